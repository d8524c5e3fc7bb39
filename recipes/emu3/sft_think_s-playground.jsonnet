// On the playground: an image-token model learns to think before it generates the image, on simple edits.
//
//   retouch train recipes/emu3/sft_think_s-playground.jsonnet
local emu3 = import '../lib/emu3_playground.libsonnet';

emu3.supervised('emu3-sft_think_s', 's', 's', think=true)
