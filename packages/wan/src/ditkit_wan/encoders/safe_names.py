"""Official files that are pickles, and the files with the same weights as safetensors."""

_REPACKAGED = "Comfy-Org/Wan_2.1_ComfyUI_repackaged"
_REPACKAGED_2_2 = "Comfy-Org/Wan_2.2_ComfyUI_Repackaged"
SAFE_NAMES = {
    "Wan2.1_VAE.pth": f"wan_2.1_vae.safetensors ({_REPACKAGED})",
    "Wan2.2_VAE.pth": f"wan2.2_vae.safetensors ({_REPACKAGED_2_2})",
    "models_t5_umt5-xxl-enc-bf16.pth": f"umt5_xxl_fp16.safetensors ({_REPACKAGED})",
    "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth": f"clip_vision_h.safetensors ({_REPACKAGED})",
}
"""The file to get instead, by name of the pickle."""
