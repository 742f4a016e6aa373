"""QK-clip: attention logits that grow too large are brought back by the weights that make them."""

from muonmesh.integrations.qk_clip.clip import QKClip

__all__ = ["QKClip"]
