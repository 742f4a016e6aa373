"""QK-clip: keeps attention logits below a threshold by scaling query and key weights."""

from muonmesh.integrations.qk_clip.clip import QKClip

__all__ = ["QKClip"]
