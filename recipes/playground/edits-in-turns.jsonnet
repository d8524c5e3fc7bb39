// Editing in several turns: the quickstart's editor makes the two or three edits of a task one after the other, each on the image that
// it has made in the turn before. A turn learns from its own reward, those of the later turns, and that of the whole task.
//
//   retouch train recipes/playground/edits-in-turns.jsonnet
//
// Nearly all of the gain over editing at once is that of the turns themselves, and little that of their training. The last image
// is scored against the whole task, on 220 held-out tasks. One seed each; each trained run makes 144 images in a step:
//
//                                     overall   exact
//   base model, all edits at once      7.05     21 %   --set eval.turns=false, before training
//   base model, edit by edit           9.42     78 %   before training
//   this recipe, 80 steps              9.65     92 %
//   trained on single edits            9.51     86 %   --set rollout.turns=null --set eval.turns=true --set data.complexity=[1] \
//                                                      --set tasks_per_step=48
//   trained at once                    8.28     43 %   --set rollout.turns=null --set eval.turns=false --set tasks_per_step=48
//
// The gain over the base model edit by edit is 0.23 (95 % interval over the tasks: 0.08 to 0.41). Over the training on single edits
// it is 0.14 (0.05 to 0.23, `retouch compare`). Both intervals are without the difference between runs, which is not small: these
// are runs with two threads, and with one (OMP_NUM_THREADS=1), and so another rounding, the last two rows are 9.58 and 8.43. A good edit
// here hardly depends on the turns around it, so the credit for later turns has little to do.
local quickstart = import '../quickstart.jsonnet';

quickstart {
  name: 'edits-in-turns',
  steps: 80,
  tasks_per_step: 16,
  rollout+: { turns: { most: 3 } },
  data+: { complexity: { '2': 1, '3': 1 }, turns: true },
  eval+: { tasks: 220, complexity: [2, 3], headline: null, best_of_k: 0 },
}
