// FLUX.1-Kontext teaches itself to make several edits at once: one GPU with 80 GB, LoRA of rank 32, 16 images of 512 px per step,
// and no judge in training.
//
//   retouch train recipes/flux-kontext/edit-by-edit.jsonnet --set data.path=DIR
//
// DIR contains photographs and a metadata.jsonl. Each line has `instruction`, the whole instruction, and `steps`, a list with its
// single edits in order: {"file_name": "a.jpg", "instruction": "Make the car red and remove the sign.",
// "steps": ["Make the car red.", "Remove the sign."]}.
//
// On-policy distillation: the base model follows `steps` one by one, each on the image before. The policy reads the whole
// instruction, samples, and learns the teacher's velocities in the states that it reaches. On the playground the teacher closes .86
// of the gap to a perfect editor (`python measurements/playground/edit_by_edit.py`), and the policy that learns from it less than
// half of the gap. PickScore and preservation are only measured.
//
// A healthy run.
// - `policy/loss` falls in the first steps, and later hardly: what is left is noise of the teacher's images.
// - `reward/source/preservation` may fall a little, because several edits change more of the image. If it keeps falling, look at
//   the images: the teacher may lose the source after many edits, so use fewer edits in a line.
// This recipe has not been run on a GPU; its twin playground/opd.jsonnet learns.
local photos = import '../lib/photos.libsonnet';
local sampling = import '../lib/sampling.libsonnet';
local kontext = import 'photos.jsonnet';

kontext {
  name: 'flux-kontext-edit-by-edit',
  tasks_per_step: 16,
  group_size: 1,
  minibatches: 1,
  rollout: sampling.pictures(6) { chunk: 12 },
  eval+: { num_steps: 12 },  // also the steps of the teacher's images
  objective: { kind: 'opd', teachers: { 'edit-by-edit': { instructions: 'steps' } } },
}
