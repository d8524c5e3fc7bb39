// Judges: rewards that ask a vision-language model. A recipe selects the model that answers (an endpoint, or a model in the
// training process) and the columns that train.
{
  // Any OpenAI-compatible server. The key is read from the environment: OPENAI_API_KEY, unless `key` names another variable.
  endpoint(model, base_url='https://api.openai.com/v1'):: { kind: 'endpoint', model: model, base_url: base_url },
  in_process(path, device=null):: { kind: 'in_process', path: path, device: device },

  // The reward of the TRL writer script: alignment and quality, 0 to 1, each the mean of three answers. Identity is scored and
  // logged but has weight 0, so changing too much is not penalised.
  alignment_quality(judge):: {
    kind: 'aspects',
    judge: judge,
    n_evals: 3,
    combine: { alignment: 0.6, quality: 0.4, identity: 0 },
  },
  // The recommended reward, which includes identity: neither no change (identity 1, alignment 0) nor a completely new image
  // (alignment 1, identity 0) is rewarded.
  alignment_identity_quality(judge):: self.alignment_quality(judge) {
    combine: '0.6 * sqrt(alignment * identity) + 0.4 * quality',
  },
}
