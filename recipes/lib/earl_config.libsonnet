// The recipe of a configuration file of EARL, which `retouch train FILE` and `retouch tools convert FILE` read as it is. CONFIG is the
// evaluated file; retouch.recipe.earl checks its keys. What a configuration does not set has EARL's value, from earl.libsonnet.
local earl = import 'earl.libsonnet';
local given = std.parseJson(std.extVar('CONFIG'));
local has(key) = std.get(given, key) != null;
local with(key, value) = if has(key) then value else {};

local lib = earl { runs:: given.base_exp_dir, judge+:: { model: given.reward_function_api_model_name, base_url: given.reward_function_api_base } };
local think = given.assistant_prefill != '<|image start|>';
local data = {
  kind: 'tokens',
  lists: given.train_paths_file,
  coefficients: std.get(given, 'coefficients', []),
  validation_lists: std.get(given, 'val_paths_file', []),
  validation_coefficients: std.get(given, 'val_coefficients', []),
  trusted: true,  // its features are .pth files, which only torch's restricted loader reads
};
local final = given.reward_final_reward;
// A reward that is computed but not trained on is a column with weight 0.
local reward =
  local both = std.get(given, 'reward_compute_viescore', false) && std.get(given, 'reward_compute_ground_score', false);
  if both && final != 'sqrt(viescore_pqxground_score)' then
    lib.reward('sqrt(viescore_pqxground_score)') {
      combine: {
        'viescore/overall': if final == 'viescore' then 1 else 0,
        'ground/ground': if final == 'ground_score' then 1 else 0,
      },
    }
  else lib.reward(final);

lib.rl('', data, think=think) {
  name: given.run_name,
  ranks: null,
  seed: std.get(given, 'random_seed', super.seed),
  steps: given.num_iterations,
  tasks_per_step: given.episodes_per_iteration / given.generations_per_sample,
  group_size: given.generations_per_sample,
  learning_rate: given.learning_rate,
  microbatch: given.per_device_batch_size,
  reward: reward,
  policy+: {
    model+: { path: given.model_path, tokenizer: given.tokenizer_path, grammar: std.get(given, 'emu3_use_logit_processor', true) },
  },
  rollout+: {
    max_new_tokens: given.max_response_tokens,
    temperature: std.get(given, 'temperature', 1.0),
    top_p: if std.get(given, 'top_p', 1.0) == 1.0 then null else given.top_p,
    top_k: if std.get(given, 'top_k', -1) == -1 then null else given.top_k,
  },
  objective+: if given.kl_coeff == 0 then { kl:: null } else { kl+: { weight: given.kl_coeff } },
  samples+: with('log_episodes_every_n_iterations', { every: given.log_episodes_every_n_iterations }),
  checkpoints+: with('save_checkpoints_every_n_iterations', { every: given.save_checkpoints_every_n_iterations })
                + with('keep_checkpoints_every_n_iterations', { keep_every: given.keep_checkpoints_every_n_iterations }),
  [if has('push_to_hub_repo_id') then 'push']: { repo: given.push_to_hub_repo_id, every: std.get(given, 'push_to_hub_every_n_iterations', 0) },
}
