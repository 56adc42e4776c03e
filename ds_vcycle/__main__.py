"""``deepspeed --module ds_vcycle VERB ...`` and ``python -m ds_vcycle VERB ...``."""

from ds_vcycle.cli import main

main()
