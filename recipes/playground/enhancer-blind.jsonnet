// A control for prompt-enhancer-playground: the text-to-image model receives the user's prompt instead of the rewritten one, so
// there is nothing to learn.
//
//   retouch train recipes/playground/enhancer-blind.jsonnet
(import '../sd3/prompt-enhancer-playground.jsonnet') {
  name: 'enhancer-blind',
  renderer+: { ignore_completions: true },
}
