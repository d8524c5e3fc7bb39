{
    // Data
    train_paths_file: [
        std.extVar("APP__DATA_DIR") + "/magicbrush/feature/list/tokenized_datalist.json",
        std.extVar("APP__DATA_DIR") + "/vismin/feature/list/tokenized_datalist.json",
    ],
    coefficients: [1.5, 1],
    val_paths_file: [
        std.extVar("APP__DATA_DIR") + "/validation_22march_256/feature/list/tokenized_datalist.json",
    ],
    val_coefficients: [1.0],
    base_exp_dir: std.extVar("APP__BASE_EXP_DIR"),

    // Model
    model_path: std.extVar("APP__DATA_DIR") + "/model",
    tokenizer_path: std.extVar("APP__DATA_DIR") + "/model",
    assistant_prefill: " Let's think step by step. <|start thinking|>", // thinks first

    // Training
    learning_rate: 3e-6,
    num_iterations: 2,
    kl_coeff: 0.0003,
    temperature: 1.0,
    per_device_batch_size: 8,

    // Sampling
    episodes_per_iteration: 2,
    generations_per_sample: 2,
    max_response_tokens: 64,
    top_p: 1.0,
    top_k: -1,
    model_context_size: 4096,

    // vLLM
    vllm_gpu_memory_utilization: 0.3,

    // Emu3
    emu3_use_logit_processor: true,
    separate_language_and_vision_vocabs: true,

    // Reward
    reward_function_api_base: std.extVar("APP__REWARD_FUNCTION_API_BASE"),
    reward_function_api_model_name: "Qwen/Qwen2.5-VL-72B-Instruct",
    reward_compute_viescore: true,
    reward_compute_ground_score: false,
    reward_final_reward: "viescore",

    // Logs and checkpoints
    run_name: std.extVar("APP__RUN_NAME"),
    log_episodes_every_n_iterations: 5,
    keep_checkpoints_every_n_iterations: 100,
    save_checkpoints_every_n_iterations: 100,
    push_to_hub_every_n_iterations: 100,
    push_to_hub_repo_id: 'imged_rl__' + $.run_name,
}
