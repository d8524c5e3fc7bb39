// On-policy distillation without a judge and without target images: the base model makes single edits well and several at once badly,
// so it teaches itself. The teacher is the base model that makes the edits of an instruction one after the other, each on the image
// before; the policy reads the whole instruction, samples, and learns the teacher's velocities in the states that it reaches. The
// reward is only measured. `python measurements/playground/edit_by_edit.py` measures the teacher itself.
//
//   retouch train recipes/playground/opd.jsonnet
//
// Look at:
// - `policy/loss` falls in the first ten steps, and later hardly: what is left is noise of the teacher's images.
// - `eval` IF and `exact` rise while IP and PQ stay: a policy that copies the source would raise IP.
local quickstart = import '../quickstart.jsonnet';

quickstart {
  name: 'playground-opd',
  steps: 40,
  tasks_per_step: 32,
  group_size: 1,
  data+: { thought: true },
  objective: { kind: 'opd', teachers: { 'edit-by-edit': { instructions: 'instructions' } } },
}
