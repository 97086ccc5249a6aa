"""The shape of tiny-k3. It knows nothing of torch, so that every other module can import it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the network; the defaults are those of the shipped tiny-k3.

    Layers are counted from 0. Every layer uses Kimi Delta Attention (KDA) except `mla_layers`,
    which use multi-head latent attention (MLA); the first `dense_layers` have a plain MLP, the
    others a mixture of experts.
    """

    vocabulary_size: int = 2048
    hidden_size: int = 192
    layers: int = 6
    heads: int = 4
    norm_eps: float = 1e-5
    attention_residual_block: int = 3

    head_dim: int = 32
    convolution_size: int = 4
    gate_lower_bound: float = -5.0

    mla_layers: tuple[int, ...] = (3,)
    query_rank: int = 64
    key_value_rank: int = 64
    nope_dim: int = 32
    rope_dim: int = 16
    value_dim: int = 32

    dense_layers: int = 1
    dense_width: int = 384
    experts: int = 64
    experts_per_token: int = 4
    expert_width: int = 128
    latent_size: int = 128
    shared_experts: int = 1
    routed_scaling_factor: float = 2.5
    situ_beta: float = 4.0
    situ_linear_beta: float = 25.0

    @property
    def projection_size(self) -> int:
        """Width of the KDA queries, keys and values: all heads side by side."""
        return self.heads * self.head_dim

    def is_mla(self, layer: int) -> bool:
        """Whether `layer` uses MLA rather than KDA."""
        return layer in self.mla_layers

    def is_dense(self, layer: int) -> bool:
        """Whether `layer` has a plain MLP rather than experts."""
        return layer < self.dense_layers
