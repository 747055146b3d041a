"""The embedding of the Wan transformer: inputs to the first carry."""

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ditkit_core.errors import UserError
from ditkit_core.models.precision import Precision
from ditkit_core.nn.functional import affine_norm, plain_sum
from ditkit_core.nn.linear import CastLinear
from ditkit_core.nn.padding import padding_mask
from ditkit_core.nn.rope import rotary_table, timestep_features
from ditkit_wan.model.carry import MusicCarry, ReferenceCarry, VaceCarry, WanCarry
from ditkit_wan.model.inputs import WanInputs, check_conditions
from ditkit_wan.model.patches import PatchEmbedding
from ditkit_wan.model.rope import rotary_angles
from ditkit_wan.model.variants.animate import AnimateEmbedding
from ditkit_wan.model.variants.camera_adapter import CameraAdapter
from ditkit_wan.model.variants.music import MusicEmbedding, frame_steps
from ditkit_wan.model.variants.reference_conv import ReferenceConv, in_front, times_in_front
from ditkit_wan.model.variants.speech import SpeechEmbedding, motion_angles, reference_angles
from ditkit_wan.presets import WanArch


class WanImageEmbedding(nn.Module):
    """CLIP's image tokens, brought to the model's width: norm, two linear layers, norm.

    Before them, for a first and a last image, a position for each token. Source: `MLPProj` in
    Wan-Video/Wan2.1, wan/modules/model.py.
    """

    def __init__(self, arch: WanArch, precision: Precision):
        super().__init__()
        self.precision = precision
        width, dim = arch.image_dim, arch.dim
        self.emb_pos: nn.Parameter | None = None
        if arch.image_positions:
            self.emb_pos = nn.Parameter(torch.zeros(1, arch.image_positions, width))
        self.proj = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, width),
            nn.GELU(),
            nn.Linear(width, dim),
            nn.LayerNorm(dim),
        )

    def forward(self, images: Sequence[Tensor]) -> Float[Tensor, "batch image dim"]:
        """Image tokens of every sample, in the matmuls' dtype.

        Args:
            images: [rows, image_dim] each, equally many.

        Raises:
            UserError: If there are more or fewer than the model has positions for.
        """
        norms, matmul = self.precision.norms, self.precision.matmul
        x = torch.stack(list(images)).to(norms)
        if self.emb_pos is not None:
            if x.shape[1] != self.emb_pos.shape[1]:
                raise UserError(
                    f"'image' has {x.shape[1]} tokens, and this model takes "
                    f"{self.emb_pos.shape[1]}: those of the first image, then those of the last"
                )
            x = x + self.emb_pos.to(norms)
        first, last = (cast(nn.LayerNorm, self.proj[index]) for index in (0, 4))
        up, gelu, down = self.proj[1], self.proj[2], self.proj[3]
        return affine_norm(
            last, down(gelu(up(affine_norm(first, x, norms, matmul)))), norms, matmul
        )


class WanEmbed(nn.Module):
    """Inputs to the carry."""

    def __init__(self, arch: WanArch, precision: Precision):
        super().__init__()
        self.arch, self.precision = arch, precision
        dim = arch.dim
        self.patch_embedding = PatchEmbedding(dim, arch.in_channels, arch.patch)
        self.text_embedding = nn.Sequential(
            nn.Linear(arch.text_dim, dim), nn.GELU(approximate="tanh"), nn.Linear(dim, dim)
        )
        self.time_embedding = nn.Sequential(
            CastLinear(arch.freq_dim, dim), nn.SiLU(), CastLinear(dim, dim)
        )
        self.time_projection = nn.Sequential(nn.SiLU(), CastLinear(dim, 6 * dim))
        if arch.image_dim:
            self.img_emb = WanImageEmbedding(arch, precision)
        if arch.vace_layers:
            self.vace_patch_embedding = PatchEmbedding(dim, arch.vace_channels, arch.patch)
            self.vace_before_proj = nn.Linear(dim, dim)
            nn.init.zeros_(self.vace_before_proj.weight)
            nn.init.zeros_(self.vace_before_proj.bias)
        if arch.ref_conv:
            self.ref_conv = ReferenceConv(arch)
        if arch.camera_channels:
            self.control_adapter = CameraAdapter(arch)
        if arch.music:
            self.patch_embedding_global = PatchEmbedding(dim, arch.in_channels, arch.patch)
            self.img_emb_refimage = WanImageEmbedding(arch, precision)
            self.music = MusicEmbedding(arch, arch.music, precision)
        if arch.speech:
            self.speech = SpeechEmbedding(arch, arch.speech, precision)
        if arch.animate:
            self.animate = AnimateEmbedding(arch, arch.animate, precision)

    def forward(self, inputs: WanInputs) -> WanCarry:
        check_conditions(self.arch, inputs)
        precision = self.precision
        grids = tuple(self._grid(latent) for latent in inputs.latents)
        latents = inputs.latents if inputs.y is None else map(_channels, inputs.latents, inputs.y)
        patches = [self.patch_embedding.patches(latent) for latent in latents]
        lengths = [len(rows) for rows in patches]
        steps = () if inputs.music is None else frame_steps(inputs.music, inputs.latents)
        tokens = self._tokens(patches, steps).to(precision.entry)
        timestep = inputs.timestep if inputs.timestep.ndim == 2 else inputs.timestep[:, None]
        late, fronts, motions = inputs.late, tuple[int, ...](), inputs.motion or [None] * len(grids)
        if inputs.camera is not None:
            tokens = plain_sum(self._camera_tokens(inputs.camera, tokens, lengths), tokens)
        if inputs.face is not None:
            tokens = plain_sum(
                self.animate.poses([pose for pose in inputs.pose or () if pose is not None]), tokens
            )
        if inputs.audio is not None:
            tokens, lengths = self._with_reference(inputs, tokens, lengths)
            late = _clip_tokens(grids, tokens)
            # reference and frames before have t = 0
            timestep = torch.cat([torch.zeros_like(timestep), timestep], 1)
        elif inputs.reference is not None:
            reference_tokens = [
                None if image is None else self.ref_conv(image.to(precision.matmul))
                for image in inputs.reference
            ]
            tokens = in_front(reference_tokens, tokens, lengths).to(precision.entry)
            num_in_front = [0 if rows is None else len(rows) for rows in reference_tokens]
            if late is not None:
                late = times_in_front(late, num_in_front, lengths)
            elif timestep.shape[1] > 1:
                timestep = times_in_front(timestep, num_in_front, lengths)
            fronts = tuple(int(rows is not None) for rows in reference_tokens)
            grids = tuple((f + front, h, w) for (f, h, w), front in zip(grids, fronts, strict=True))
            lengths = [math.prod(grid) for grid in grids]
        has_motion = [motion is not None for motion in motions]
        layouts = list(zip(grids, steps or [1] * len(grids), has_motion, strict=True))
        if len(set(layouts)) == 1:
            layouts = layouts[:1]
        angles = [self._angles(*layout, tokens.device) for layout in layouts]
        # padding has angle 0 and is not rotated
        table = pad_sequence(angles, batch_first=True)[:, :, None]
        features = timestep_features(timestep, self.arch.freq_dim, precision.timestep)
        time = self.time_embedding(features.to(precision.time_mlp))
        text = self.text_embedding(self._padded_text(inputs.text).to(precision.matmul))
        image: Any = None if inputs.image is None else self.img_emb(inputs.image)
        # its tokens replace the first frame's, which are appended to the text
        if inputs.refimage is not None:
            text, image = torch.cat([image, text], 1), self.img_emb_refimage(inputs.refimage)
        return WanCarry(
            tokens=tokens,
            modulation=self.time_projection(time).unflatten(-1, (6, -1)).to(precision.modulation),
            time=time,
            rotary=rotary_table(table, precision.rotary_tables),
            text=text,
            padding_mask=padding_mask(lengths, tokens.device),
            grids=grids,
            late=late,
            image=image,
            reference=ReferenceCarry(fronts) if fronts else None,
            vace=None if inputs.vace is None else VaceCarry(self._vace(inputs.vace, tokens)),
            music=None
            if inputs.music is None
            else self._music(inputs.music, grids, steps, inputs.skips),
            speech=None if inputs.audio is None else self.speech.audio(inputs.audio),
            face=None if inputs.face is None else self.animate.faces(inputs.face),
        )

    def _angles(
        self, grid: tuple[int, int, int], step: int, has_motion: bool, device: torch.device
    ) -> Float[Tensor, "tokens pairs"]:
        """Angles of a sample's tokens: those of its grid, then S2V's."""
        head_dim, (_, height, width) = self.arch.head_dim, grid
        angles = rotary_angles(grid, head_dim, device, step)
        if not self.arch.speech:
            return angles
        more = [motion_angles(height, width, head_dim, device)] if has_motion else []
        return torch.cat([angles, reference_angles(height, width, head_dim, device), *more])

    def _with_reference(
        self, inputs: WanInputs, tokens: Float[Tensor, "batch tokens dim"], lengths: Sequence[int]
    ) -> tuple[Float[Tensor, "batch more dim"], list[int]]:
        """S2V's tokens of all samples, and their numbers: the clip's with its poses, the reference
        image's, and those of the frames before it."""
        assert inputs.reference is not None, "checked"
        patches = [
            self.patch_embedding.patches(image) for image in inputs.reference if image is not None
        ]
        references = [
            self.patch_embedding(rows.to(self.precision.matmul)).to(tokens.dtype)
            for rows in patches
        ]
        tokens = plain_sum(self.speech.poses(inputs.pose, inputs.latents), tokens)
        clips = [row[:length] for row, length in zip(tokens, lengths, strict=True)]
        motions = inputs.motion or [None] * len(clips)
        rows = [
            self.speech.marked(*kinds) for kinds in zip(clips, references, motions, strict=True)
        ]
        return pad_sequence(rows, batch_first=True), [len(row) for row in rows]

    def _tokens(
        self, patches: Sequence[Tensor], steps: Sequence[int]
    ) -> Float[Tensor, "batch tokens dim"]:
        """Embedded patches; WanToDance's keyframes have a separate embedding; each lasts several
        rows of music."""
        embeddings = [
            self.patch_embedding_global if step > 1 else self.patch_embedding for step in steps
        ]
        if len(set(embeddings)) <= 1:
            return self._embedded((embeddings or [self.patch_embedding])[0], patches)
        pairs = zip(embeddings, patches, strict=True)
        return pad_sequence(
            [embedding(rows.to(self.precision.matmul)) for embedding, rows in pairs],
            batch_first=True,
        )

    def _camera_tokens(
        self,
        cameras: Sequence[Tensor | None],
        tokens: Float[Tensor, "batch tokens dim"],
        lengths: Sequence[int],
    ) -> Float[Tensor, "batch tokens dim"]:
        """The sum that each sample's camera adds to its tokens; zeros without a camera."""
        none = [
            tokens.new_zeros(length, tokens.shape[2], dtype=self.precision.matmul)
            for length in lengths
        ]
        pairs = zip(cameras, none, strict=True)
        rows = [
            zeros if rays is None else self.control_adapter(rays.to(self.precision.matmul))
            for rays, zeros in pairs
        ]
        return pad_sequence(rows, batch_first=True)

    def _embedded(
        self, embedding: nn.Module, patches: Sequence[Tensor]
    ) -> Float[Tensor, "batch tokens dim"]:
        embedded: Tensor = embedding(
            pad_sequence(list(patches), batch_first=True).to(self.precision.matmul)
        )
        return embedded

    def _vace(
        self, controls: Sequence[Tensor], tokens: Float[Tensor, "batch tokens dim"]
    ) -> Float[Tensor, "batch tokens dim"]:
        """The input of VACE's first block; the official code computes it in that block."""
        embedding = self.vace_patch_embedding
        stream = self._embedded(embedding, [embedding.patches(control) for control in controls])
        return plain_sum(self.vace_before_proj(stream), tokens)

    def _music(
        self,
        music: Sequence[Tensor],
        grids: Sequence[tuple[int, int, int]],
        steps: tuple[int, ...],
        skips: bool,
    ) -> MusicCarry:
        rows = self.music(music, [frames for frames, _, _ in grids])
        return MusicCarry(rows, steps=steps, skips=skips)

    def _grid(self, latent: Tensor) -> tuple[int, int, int]:
        frames, height, width = (
            size // step for size, step in zip(latent.shape[1:], self.arch.patch, strict=True)
        )
        return frames, height, width

    def _padded_text(self, text: Sequence[Tensor]) -> Float[Tensor, "batch text text_dim"]:
        return torch.stack(
            [F.pad(rows, (0, 0, 0, self.arch.text_tokens - len(rows))) for rows in text]
        )


def _clip_tokens(
    grids: Sequence[tuple[int, int, int]], tokens: Float[Tensor, "batch tokens dim"]
) -> Bool[Tensor, "batch tokens"]:
    """True for the tokens of each sample's clip, which come first."""
    mask = torch.zeros(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
    for row, grid in zip(mask, grids, strict=True):
        row[: math.prod(grid)] = True
    return mask


def _channels(latents: Tensor, y: Tensor) -> Float[Tensor, "channels frames height width"]:
    """Noised latents followed by `y`, which is not noised."""
    return torch.cat([latents, y.to(latents.dtype)])
