"""Names the families from which vLLM 0.32 cannot extract hidden states."""

WITHOUT_STREAMS = (
    *("axk1", "bloom", "cohere", "cohere2", "dbrx", "ernie4_5_moe", "exaone4", "exaone_moe", "falcon", "falcon_h1"),
    *("falcon_mamba", "gemma", "gemma2", "gemma3_text", "gemma3n", "gemma3n_text", "glm4", "glm4_moe", "glm4_moe_lite"),
    *("gpt-sw3", "gpt2", "gptj", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "hrm_text"),
    *("hy_v3", "hyperclovax", "jamba", "lfm2", "lfm2_moe", "longcat_flash", "mamba", "mamba2", "mimo", "mixtral"),
    *("nemotron", "olmo_hybrid", "olmoe", "opt", "qwen2_moe", "stablelm", "zamba2"),
)
"""Families whose class in vLLM does not return residual streams.

MiMo's forward leaves them out, the others have no `SupportsEagle3`. The class of a model with images around such a
family, or around another one, may differ: then vLLM itself refuses the head when it starts.
"""
