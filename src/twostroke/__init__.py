"""twostroke: disaggregated prefill/decode serving for large language models.

The folders at the repository root (`cluster/`, `engine/`, `router/`, ...) are imported under this one
namespace through a link farm; see docs/adr/0001-namespace-and-link-farm.md.
"""

__version__ = "0.1.0"
