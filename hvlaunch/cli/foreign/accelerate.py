"""The options of accelerate launch. Most set a variable that its library reads: these are given by -x here."""

from hvlaunch.cli.foreign.foreign_option import ForeignOption, absent, needless, other, same, word

__all__ = ["ACCELERATE"]

_PLUGINS = """
fsdp: version offload_params min_num_params sharding_strategy reshard_after_forward auto_wrap_policy backward_prefetch
backward_prefetch_policy state_dict_type forward_prefetch use_orig_params cpu_ram_efficient_loading sync_module_states activation_checkpointing
activation_checkpointing_offload

megatron_lm: tp_degree use_custom_fsdp no_load_optim eod_mask_loss overlap_cpu_optimizer_d2h_h2d no_save_optim
optimizer_cpu_offload use_precision_aware_optimizer decoder_last_pipeline_num_layers pp_degree num_micro_batches
sequence_parallelism recompute_activations use_distributed_optimizer gradient_clipping recompute_granularity recompute_method
recompute_num_layers attention_backend expert_model_parallel_size context_parallel_size attention_dropout hidden_dropout
attention_softmax_in_fp32 expert_tensor_parallel_size calculate_per_token_loss use_rotary_position_embeddings

parallelism_config: dp_replicate_size dp_shard_size tp_size cp_size cp_backend cp_comm_strategy sp_size sp_backend
sp_seq_length sp_seq_length_is_variable sp_attn_implementation
"""
"""Groups of options whose variables are their names in capitals: --fsdp_version is FSDP_VERSION."""

_VARIABLES = {
    "--fsdp_transformer_layer_cls_to_wrap NAMES": "FSDP_TRANSFORMER_CLS_TO_WRAP={}",
    "--mixed_precision TYPE": "ACCELERATE_MIXED_PRECISION={}",
    "--num_cpu_threads_per_process N": "OMP_NUM_THREADS={}",
    "--enable_cpu_affinity": "ACCELERATE_CPU_AFFINITY=1",
    "--gpu_ids IDS": "CUDA_VISIBLE_DEVICES={}",
    "--cpu": "ACCELERATE_USE_CPU=true",
    "--ipex": "ACCELERATE_USE_IPEX=true",
    "--use_xpu": "ACCELERATE_USE_XPU=true",
    "--mpirun_ccl N": "CCL_WORKER_COUNT={}",
    "--debug": "ACCELERATE_DEBUG_MODE=true",
    "--dynamo_backend NAME": "ACCELERATE_DYNAMO_BACKEND={}",
    "--dynamo_mode MODE": "ACCELERATE_DYNAMO_MODE={}",
    "--dynamo_use_fullgraph": "ACCELERATE_DYNAMO_USE_FULLGRAPH=True",
    "--dynamo_use_dynamic": "ACCELERATE_DYNAMO_USE_DYNAMIC=True",
    "--dynamo_use_regional_compilation": "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION=True",
    "--use_fsdp": "ACCELERATE_USE_FSDP=true",
    "--use_deepspeed": "ACCELERATE_USE_DEEPSPEED=true",
    "--use_megatron_lm": "ACCELERATE_USE_MEGATRON_LM=true",
    "--use_parallelism_config": "ACCELERATE_USE_PARALLELISM_CONFIG=true",
    "--deepspeed_config_file FILE": "ACCELERATE_DEEPSPEED_CONFIG_FILE={}",
    "--deepspeed_moe_layer_cls_names NAMES": "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES={}",
    "--zero_stage N": "ACCELERATE_DEEPSPEED_ZERO_STAGE={}",
    "--zero3_init_flag BOOL": "ACCELERATE_DEEPSPEED_ZERO3_INIT={}",
    "--zero3_save_16bit_model BOOL": "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL={}",
    "--offload_optimizer_device DEVICE": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE={}",
    "--offload_param_device DEVICE": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE={}",
    "--gradient_accumulation_steps N": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS={}",
    "--gradient_clipping NORM": "ACCELERATE_GRADIENT_CLIPPING={}",
    "--fp8_backend NAME": "ACCELERATE_FP8_BACKEND={}",
    "--fp8_format FORMAT": "ACCELERATE_FP8_FORMAT={}",
    "--fp8_margin N": "ACCELERATE_FP8_MARGIN={}",
    "--fp8_interval N": "ACCELERATE_FP8_INTERVAL={}",
    "--fp8_amax_history_len N": "ACCELERATE_FP8_AMAX_HISTORY_LEN={}",
    "--fp8_amax_compute_algo NAME": "ACCELERATE_FP8_AMAX_COMPUTE_ALGO={}",
    "--fp8_opt_level LEVEL": "ACCELERATE_FP8_OPT_LEVEL={}",
    "--fp8_use_autocast_during_eval": "ACCELERATE_FP8_USE_AUTOCAST_DURING_EVAL=True",
    "--fp8_enable_fsdp_float8_all_gather BOOL": "ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER={}",
    "--fp8_pad_inner_dim BOOL": "ACCELERATE_FP8_PAD_INNER_DIM={}",
}


def _plugins() -> tuple[ForeignOption, ...]:
    rows: tuple[ForeignOption, ...] = ()
    for group in _PLUGINS.strip().split("\n\n"):
        prefix, _, names = group.partition(":")
        for name in (f"{prefix}_{each}" for each in names.split()):
            rows += word(f"-x {name.upper()}={{}}", f"--{name} VALUE")
    return rows


ACCELERATE = (
    *same("-h, --help", "--quiet"),
    *word("--quiet", "-q"),
    *word("-np {}", "--num_processes N"),
    *word("--nnodes {}, and -H a:4,b:4 with the hosts", "--num_machines N"),
    *needless("hvlaunch numbers the hosts", "--machine_rank N"),
    *needless(
        "hvlaunch finds the address and a free port", "--main_process_ip ADDRESS", "--main_process_port PORT"
    ),
    *needless("hvlaunch finds out which addresses the hosts reach", "--same_network"),
    *needless("hvlaunch's own rendezvous is always there", "--rdzv_backend NAME", "--rdzv_conf CONF"),
    *needless("Accelerator() finds the GPUs and the other workers", "--multi_gpu"),
    *needless("hvlaunch hears at once how a worker ends", "--monitor_interval SECONDS"),
    *same("--max_restarts N", "--no_python", "-m, --module", "--log_dir DIR", "--tee STREAMS"),
    *word("--tee {}", "-t STREAMS"),
    *absent("workers have no roles; a script can read its RANK", "--role NAME"),
    *word("-x ACCELERATE_NAME=VALUE for its settings; hvlaunch starts the workers", "--config_file FILE"),
    *word("--mpi --hostfile {}", "--mpirun_hostfile FILE"),
    *word("--hostfile {}", "--deepspeed_hostfile FILE"),
    *word("--include {}", "--deepspeed_inclusion_filter SPEC"),
    *word("--exclude {}", "--deepspeed_exclusion_filter SPEC"),
    *word("--mpi, --srun or --gloo", "--deepspeed_multinode_launcher NAME"),
    *word(
        "the file of ACCELERATE_DEEPSPEED_CONFIG_FILE",
        "--offload_optimizer_nvme_path, --offload_param_nvme_path PATH",
    ),
    *word(
        "-x ACCELERATE_FP8_OVERRIDE_FPROP=VALUE, and the same with DGRAD and WGRAD",
        "--fp8_override_linear_precision TYPES",
    ),
    *(row for spelled, variable in _VARIABLES.items() for row in word(f"-x {variable}", spelled)),
    *_plugins(),
    *other("--env all passes on what other hosts can use; one variable is -x NAME=VALUE", "--env NAME=VALUE"),
    *absent(
        "TPU pods have a launcher of their own",
        "--tpu, --tpu_cluster, --no_tpu_cluster, --tpu_use_sudo, --downcast_bf16",
    ),
    *absent("TPU pods have a launcher of their own", "--vm, --main_training_function NAME"),
    *absent("SageMaker starts its jobs itself", "--aws_access_key_id, --aws_secret_access_key KEY"),
)
