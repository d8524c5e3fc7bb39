// EARL: an autoregressive model edits by generating image tokens, and a vision-language model judges the edits. The supervised
// stage and the RL stage share model, data and sizes; a recipe chooses the data, the initial weights, and whether the model thinks
// first.
//
// Environment variables, as in the source:
// APP__DATA_DIR: folder of the token lists (omniedit, magicbrush, ...), as `retouch data tokenize` writes them
// APP__BASE_EXP_DIR: folder of the runs; RL starts from an exported supervised run in it
// APP__REWARD_FUNCTION_API_BASE: address of the server of the judge, http://HOST:PORT
// APP__RUN_NAME: name of the run
local list(name) = std.extVar('APP__DATA_DIR') + '/' + name;

{
  runs:: std.extVar('APP__BASE_EXP_DIR'),

  // The weights of a supervised run, from which RL starts: `retouch export RUN --to RUN/exported`.
  exported(name):: $.runs + '/' + name + '/exported/writer',

  model(path, think):: {
    kind: 'emu3',
    path: path,
    tokenizer: 'Emu3-community/Emu3-Gen-hf',
    autoencoder: 'BAAI/Emu3-VisionTokenizer',
    size: [256, 256],
    think: think,
  },

  // Simple edits (S), complex edits (C), and both (S+C), with the source's coefficients. C has the coefficients of S+C without the
  // first.
  local complex = ['magicbrush', 'aurora-AG', 'aurora-kubric', 'ss2', 'vismin', 'human-edit'],
  local coefficients = [6, 6, 0.7, 1.55, 3.7, 11],
  data: {
    s: $.tokens(['omniedit'], []),
    c: $.tokens(complex, coefficients),
    sc: $.tokens(['omniedit'] + complex, [0.13] + coefficients),
  },
  // The same data in the layout of mair-lab/earl-datasets: a folder per data set and split. Held-out scores are reported per data
  // set.
  published:: {
    local names = ['magic_brush', 'aurora_ag', 'aurora_kubric', 'ss2', 'vismin', 'human-edit'],
    s: $.tokens_published(['omniedit'], []),
    c: $.tokens_published(names, coefficients),
    sc: $.tokens_published(['omniedit'] + names, [0.13] + coefficients),
  },
  tokens(names, coefficients):: {
    kind: 'tokens',
    lists: [list(name) for name in names],
    coefficients: coefficients,
    validation_lists: [list('validation_22march_256')],
    validation_coefficients: [1.0],
  },
  tokens_published(names, coefficients):: {
    kind: 'tokens',
    lists: [list('earl-datasets/%s/train' % name) for name in names],
    coefficients: coefficients,
    validation_lists: [list('earl-datasets/%s/validation' % name) for name in names],
  },

  // Any OpenAI-compatible server, with or without /v1 in its address; several runs can share it.
  judge:: {
    kind: 'endpoint',
    model: 'Qwen/Qwen2.5-VL-72B-Instruct',
    base_url: std.extVar('APP__REWARD_FUNCTION_API_BASE'),
    key: null,
    concurrency: 64,
    timeout: 1000,
    deadline: 2000,
    wait: 7200,
  },
  // The source's option `reward_final_reward`, with its three values.
  reward(final):: {
    viescore: { kind: 'viescore', judge: $.judge, combine: { overall: 1 } },
    ground_score: { kind: 'ground', judge: $.judge, temperature: 0.3, combine: { ground: 1 } },
    'sqrt(viescore_pqxground_score)': {
      kind: 'several',
      rewards: {
        viescore: { kind: 'viescore', judge: $.judge },
        ground: { kind: 'ground', judge: $.judge, temperature: 0.3 },
      },
      combine: final,
    },
  }[final],

  base(name, path, think):: {
    name: name,
    out: $.runs,
    seed: 42,
    ranks: 8,
    sharding: 'zero2',
    policy: {
      kind: 'autoregressive',
      model: $.model(path, think),
      train: { kind: 'full' },
      gradient_checkpointing: true,
    },
    rollout: { kind: 'tokens', max_new_tokens: 2048, temperature: 1.0, chunk: 16 },
    renderer: { kind: 'codes', batch: 4 },
    reward: $.reward('viescore'),
    optimizer: { max_grad_norm: 1.0 },
    eval: { every: 100, tasks: 64, batch: 8 },
    checkpoints: { every: 100, keep: 2, keep_every: 100 },
  },

  // Supervised learning of the images (after a thought, if the model thinks). Initial weights, batch size and schedule are those of
  // the source's script (scripts/ie_sft.sh): a cosine from 1e-4 to 1e-5.
  sft(name, data=null, phases=null, think=false):: $.base(name, 'BAAI/Emu3-Stage1', think) {
    tasks_per_step: 64,
    group_size: 1,
    learning_rate: 1e-4,
    microbatch: 4,
    optimizer: {
      schedule: 'cosine',
      final_share: 0.1,
      warmup_steps: 30,
      weight_decay: 0.1,
      max_grad_norm: 5.0,
      betas: [0.9, 0.95],
      eps: 1e-6,
    },
    objective: { kind: 'sft', normalise: 'token' },
    data: if data != null then data else phases[0].data,
    [if phases != null then 'phases']: phases,
    [if phases == null then 'steps']: 10800,
    eval+: { every: 1000 },
    samples: { every: 1000 },
  },

  // All values are those of the source. Its 128 episodes with 8 samples per task are 16 tasks. Its loss has no ratio and no
  // clipping, so there is one update per rollout.
  rl(start, data, final='viescore', think=false):: $.base(std.extVar('APP__RUN_NAME'), $.exported(start), think) {
    steps: 2000,
    tasks_per_step: 16,
    group_size: 8,
    learning_rate: 3e-6,
    microbatch: if think then 4 else 8,
    data: data,
    reward: $.reward(final),
    advantage: { kind: 'group', scale: 'group', ddof: 0, eps: 1e-4, clip: null },
    objective: {
      kind: 'policy_gradient',
      surrogate: 'reinforce',
      kl: { kind: 'k3', weight: 3e-4 },
      normalise: 'token',
    },
    devices: { reference: 'cpu' },
    samples: { every: 5 },
  },
}
