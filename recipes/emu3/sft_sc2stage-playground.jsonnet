// On the playground: a second stage of supervised learning of image tokens, on both kinds of edits, after a stage on simple edits.
//
//   retouch train recipes/emu3/sft_sc2stage-playground.jsonnet
local emu3 = import '../lib/emu3_playground.libsonnet';

emu3.supervised('emu3-sft_sc2stage', 's', 'sc')
