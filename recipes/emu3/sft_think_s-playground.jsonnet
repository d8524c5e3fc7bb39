// On the playground: image tokens learn to think before they draw, on simple edits.
//
//   retouch train recipes/emu3/sft_think_s-playground.jsonnet
local emu3 = import '../lib/emu3_playground.libsonnet';

emu3.supervised('emu3-sft_think_s', 's', 's', think=true)
