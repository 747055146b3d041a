"""tools/demo/train_demo_base_zimage.py: the VAE that it makes of another."""

import pytest
import torch
from safetensors.torch import load_file

from ditkit_core.families.demo_places import IMAGES, render
from workspace import ROOT


@torch.no_grad()
def test_the_vae_is_that_of_flux2s_demo_with_normalised_latents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "demo"))
    from place_bases import in_bf16, pixels_of
    from train_demo_base_zimage import demo, flux2, vae_weights

    theirs, ours = flux2.build_vae(), demo.build_vae()
    theirs.load_state_dict(load_file(flux2.WEIGHTS / "vae.safetensors"))
    ours.load_state_dict(vae_weights())
    pixels = pixels_of([render(example.image) for example in IMAGES if example.image.height == 64])
    before, latents = (
        theirs.encode(pixels).latent_dist.mode(),
        ours.encode(pixels).latent_dist.mode(),
    )
    assert latents.mean().abs() < 0.1 and 0.8 < latents.std() < 1.3
    torch.testing.assert_close(
        ours.decode(latents).sample, theirs.decode(before).sample, atol=1e-4, rtol=0
    )
    stored = load_file(demo.WEIGHTS / "vae.safetensors")
    made = in_bf16(vae_weights())
    assert stored.keys() == made.keys()
    for name, value in made.items():
        torch.testing.assert_close(stored[name].float(), value.float(), atol=1e-5, rtol=0.01)
