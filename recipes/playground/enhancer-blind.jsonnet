// A control of prompt-enhancer-playground: the painter is told what was asked for and not what was written, so there is nothing to
// learn.
//
//   retouch train recipes/playground/enhancer-blind.jsonnet
(import '../sd3/prompt-enhancer-playground.jsonnet') {
  name: 'enhancer-blind',
  renderer+: { blind: true },
}
