"""Deliberate bugs in the reward server and its client."""

from mutant import Mutant

FAULTS = "tests/rewards/client/test_remote.py"
ALONE = f"{FAULTS}::test_scores_are_missing_if_the_only_server_is_faulty"
OTHER = f"{FAULTS}::test_scores_come_from_another_server_after_a_faulty_reply"
HOSTILE = "tests/serving/test_hostile.py"
SERVER = "tests/serving/test_server.py"
CLIENT = "tests/rewards/client/test_remote.py"
CONNECTIONS = "tests/serving/test_connections.py"
QUOTA = "tests/judge/test_quota.py"

SERVING = (
    # Checks of replies
    Mutant(
        "scores are matched by position instead of by id",
        "retouch_serve/wire.py",
        'scores[item["id"]] = _item_scores(item, expected)',
        "scores[list(ids)[len(scores)]] = _item_scores(item, expected)",
        f"{FAULTS}::test_remote_scores_equal_local_scores_and_pass_the_contract_checks",
    ),
    Mutant(
        "scores outside their declared range are accepted",
        "retouch_serve/wire.py",
        "if not abs(value) <= LARGEST or not column.contains(value):",
        "if False:",
        f"{OTHER}[a number above the range]",
    ),
    Mutant(
        "the JSON value true is accepted as the score 1",
        "retouch_serve/wire.py",
        "isinstance(value, bool) or not isinstance(value, int | float)",
        "not isinstance(value, int | float)",
        f"{OTHER}[true for a number]",
    ),
    Mutant(
        "scores of another judge are accepted",
        "retouch_serve/wire.py",
        "if judges != {name: [fingerprint] for name, fingerprint in expected.judges.items()}:",
        "if not isinstance(judges, dict):",
        f"{OTHER}[another judge]",
    ),
    Mutant(
        "samples that could not be scored get 0 instead of NaN",
        "retouch_serve/client.py",
        'nan = float("nan")',
        "nan = 0.0",
        f"{ALONE}[500]",
    ),
    # Choice of the endpoint
    Mutant(
        "the last available endpoint is excluded too",
        "retouch_serve/client.py",
        "if fault.slow or (fault.blames_server and others):",
        "if fault.slow or fault.blames_server:",
        f"{CLIENT}::test_a_failing_endpoint_is_excluded_unless_it_is_the_last_one_until_a_probe_finds_it_ready",
    ),
    Mutant(
        "an endpoint that recovers is never used again",
        "retouch_serve/client.py",
        "succeeded = judges == self._expected.judges",
        "succeeded = False",
        f"{CLIENT}::test_client_of_a_single_hanging_server_retries_when_it_is_ready",
    ),
    # Size and number of requests
    Mutant(
        "processes that name the same quota file do not share its counts",
        "retouch_judge/quota.py",
        "os.pwrite(descriptor, self._format.pack(*numbers), 0)",
        "self._format.pack(*numbers)",
        f"{QUOTA}::test_processes_that_name_one_file_have_one_quota",
    ),
    Mutant(
        "the rate limit ignores the requests of the last minute",
        "retouch_judge/quota.py",
        "if total + most <= self.per_minute:",
        "if True:",
        f"{QUOTA}::test_no_minute_exceeds_the_limits_for_any_sequence_of_requests",
    ),
    Mutant(
        "the unused part of a request's reserved units is not returned",
        "retouch_judge/quota.py",
        "numbers[index + 1] += used - most",
        "pass",
        f"{QUOTA}::test_at_least_90_percent_of_the_rate_is_used_under_load[90000-3000-1000]",
    ),
    Mutant(
        "a retry does not count towards the budget of calls",
        "retouch_serve/client.py",
        "if chunk.attempts and not await asyncio.to_thread(self._quota.claim_another):",
        "if False:",
        f"{CLIENT}::test_retries_count_against_the_call_budget_and_requests_beyond_it_raise",
    ),
    Mutant(
        "a spent budget raises no error on any rank",
        "run/step.py",
        "if any_spent:",
        "if False:",
        "tests/training/test_loop.py::test_spent_budget_of_one_rank_raises_on_all_ranks_after_all_chunks_are_submitted",
    ),
    # Checks of requests
    Mutant(
        "the size of a request body is not checked while it is received",
        "retouch_serve/front.py",
        "if len(content) + len(part) > max_bytes:",
        "if False:",
        f"{HOSTILE}::test_malformed_bodies_are_rejected[own-a body that is too long without saying]",
    ),
    Mutant(
        "a batch with a repeated id is accepted",
        "retouch_serve/requests.py",
        "or len({item.id for item in batch.items}) != len(batch.items)",
        "or not batch.items",
        f"{HOSTILE}::test_malformed_batch_documents_are_rejected[own-an id twice]",
    ),
    Mutant(
        "any bearer token is accepted",
        "retouch_serve/app.py",
        'hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), self._token)',
        "bool(given)",
        f"{SERVER}::test_without_its_token_only_the_health_pages_answer",
    ),
    # Scoring
    Mutant(
        "one bad sample fails its whole batch",
        "retouch_serve/hosted.py",
        "if len(samples) == 1:",
        "if samples:",
        f"{SERVER}::test_a_reward_that_fails_on_one_sample_scores_the_others[own-raise-scores0-errors0]",
    ),
    Mutant(
        "samples of cancelled requests are scored",
        "retouch_serve/service.py",
        "if request.done.done():\n                continue",
        "if False:\n                continue",
        f"{SERVER}::test_a_full_queue_returns_429_and_an_expired_deadline_504",
    ),
    Mutant(
        "a server that is shutting down accepts new requests",
        "retouch_serve/service.py",
        "if self.draining:",
        "if False:",
        f"{SERVER}::test_draining_server_completes_requests_in_flight_and_rejects_new_ones",
    ),
    # Limits before authentication
    Mutant(
        "there is no time limit for request headers",
        "retouch_serve/front.py",
        'self._deadline = self.loop.call_later(self._limits.header_seconds, self._refuse, "too_slow")',
        "pass",
        f"{CONNECTIONS}::test_incomplete_headers_end_the_connection_with_408",
    ),
    Mutant(
        "each received byte of a header restarts the time limit",
        "retouch_serve/front.py",
        "if not self._in_request and not self._expecting:",
        "if not self._in_request:",
        f"{CONNECTIONS}::test_slowly_sent_headers_do_not_extend_the_time_limit",
    ),
    Mutant(
        "a waiting connection is not closed to make room for a new one",
        "retouch_serve/front.py",
        "if oldest is None:\n                return False",
        "if True:\n                return False",
        f"{CONNECTIONS}::test_server_answers_despite_many_slow_connections",
    ),
    Mutant(
        "a connection with a request in progress is closed to make room",
        "retouch_serve/front.py",
        "else:\n            self._counted.waits(self, waiting=bool(self.pipeline))",
        "else:\n            pass",
        f"{CONNECTIONS}::test_a_connection_with_a_request_in_progress_is_not_replaced",
    ),
    Mutant(
        "the number and the size of headers are not limited",
        "retouch_serve/front.py",
        "if self._header_lines > self._limits.max_headers or self._header_bytes > self._limits.max_header_bytes:",
        "if False:",
        f"{CONNECTIONS}::test_oversized_headers_are_rejected_early",
    ),
    Mutant(
        "a connection whose request body continues after the reply is not closed",
        "retouch_serve/front.py",
        "self._end_by(_LINGER_SECONDS)",
        "pass",
        f"{CONNECTIONS}::test_connection_is_closed_if_the_body_continues_after_the_reply",
    ),
    Mutant(
        "no file descriptors are kept in reserve",
        "retouch_serve/front.py",
        "soft - _RESERVE - (",
        "soft - (",
        f"{CONNECTIONS}::test_file_descriptors_are_kept_in_reserve_under_a_low_limit",
    ),
    Mutant(
        "any Host header is accepted",
        "retouch_serve/wire.py",
        '(f"http://{hosts[0]}", *origins)',
        "origins",
        f"{CONNECTIONS}::test_other_host_and_origin_headers_are_rejected_without_a_token",
    ),
    Mutant(
        "any Origin header is accepted",
        "retouch_serve/wire.py",
        '(f"http://{hosts[0]}", *origins)',
        '(f"http://{hosts[0]}",)',
        f"{CONNECTIONS}::test_other_host_and_origin_headers_are_rejected_without_a_token",
    ),
    Mutant(
        "the memory of an image is released from the budget before the image is freed",
        "retouch_serve/front.py",
        "weakref.finalize(image, self.release, count).atexit = False",
        "self.release(count)",
        f"{CONNECTIONS}::test_memory_budget_refuses_what_exceeds_it_and_releases_memory",
    ),
    Mutant(
        "the memory budget is not enforced",
        "retouch_serve/front.py",
        "if self._settle() + count > self._most:",
        "if False:",
        f"{CONNECTIONS}::test_request_bodies_count_against_the_memory_budget",
    ),
    Mutant(
        "no log line is dropped at a high rate",
        "retouch_serve/front.py",
        "if own < 1 or every < 1:",
        "if False:",
        f"{CONNECTIONS}::test_a_log_is_written_at_a_bounded_rate",
    ),
    Mutant(
        "only the log rate of each message is limited, not the total rate",
        "retouch_serve/front.py",
        "if own < 1 or every < 1:",
        "if own < 1:",
        f"{CONNECTIONS}::test_a_log_is_written_at_a_bounded_rate",
    ),
)
