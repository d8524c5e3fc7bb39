"""Deliberate bugs in the reward server and its client."""

from mutant import Mutant

FAULTS = "tests/rewards/client/test_remote_faults.py"
ALONE = f"{FAULTS}::test_without_another_server_the_samples_are_missing"
HOSTILE = "tests/serving/test_hostile.py"
SERVER = "tests/serving/test_server.py"
CLIENT = "tests/rewards/client/test_remote.py"
CONNECTIONS = "tests/serving/test_connections.py"
QUOTA = "tests/rewards/quota/test_quota.py"

SERVING = (
    # Checks of replies
    Mutant(
        "scores joined by place and not by id",
        "rewards/wire/replies.py",
        'scores[item["id"]] = _item_scores(item, expected)',
        "scores[list(ids)[len(scores)]] = _item_scores(item, expected)",
        f"{FAULTS}::test_an_order_of_its_own_is_no_fault",
    ),
    Mutant(
        "numbers out of their range are believed",
        "rewards/wire/replies.py",
        "if not abs(value) <= LARGEST or not in_range(value, column):",
        "if False:",
        f"{ALONE}[a number above the range]",
    ),
    Mutant(
        "true counts as 1",
        "rewards/wire/replies.py",
        "isinstance(value, bool) or not isinstance(value, int | float)",
        "not isinstance(value, int | float)",
        f"{ALONE}[true for a number]",
    ),
    Mutant(
        "another judge's numbers are believed",
        "rewards/wire/replies.py",
        "if judges != {name: [fingerprint] for name, fingerprint in expected.judges.items()}:",
        "if not isinstance(judges, dict):",
        f"{ALONE}[another judge]",
    ),
    Mutant(
        "a fault is a zero",
        "rewards/client/client.py",
        'nan = float("nan")',
        "nan = 0.0",
        f"{ALONE}[500]",
    ),
    # Choice of the server
    Mutant(
        "the last endpoint is given up",
        "rewards/client/pool.py",
        "endpoint.breaker.failed(now, last=not others)",
        "endpoint.breaker.failed(now, last=False)",
        f"{CLIENT}::test_the_last_endpoint_stays_closed_until_another_is_back",
    ),
    Mutant(
        "an endpoint that recovers is never asked again",
        "rewards/client/session.py",
        "succeeded = judges_of(info, self._settings.rewards) == self._expected.judges",
        "succeeded = False",
        f"{CLIENT}::test_a_server_that_comes_back_is_asked_again",
    ),
    # Size and number of requests
    Mutant(
        "a quota that each process has to itself",
        "rewards/quota/shared_numbers.py",
        "os.pwrite(descriptor, self._format.pack(*numbers), 0)",
        "self._format.pack(*numbers)",
        f"{QUOTA}::test_processes_that_name_one_file_have_one_quota",
    ),
    Mutant(
        "what was begun in the last minute does not count",
        "rewards/quota/rate.py",
        "if total + most <= self.per_minute:",
        "if True:",
        f"{QUOTA}::test_no_minute_has_more_however_requests_come_and_whatever_they_took",
    ),
    Mutant(
        "what a request did not take is never given back",
        "rewards/quota/rate.py",
        "numbers[index + 1] += used - most",
        "pass",
        f"{QUOTA}::test_where_there_is_work_at_least_nine_tenths_are_used[90000-3000-1000]",
    ),
    Mutant(
        "asking again costs no call of the budget",
        "rewards/client/session.py",
        "if again and not await asyncio.to_thread(self._quota.claim_another):",
        "if False:",
        f"{CLIENT}::test_an_attempt_too_many_for_the_budget_is_not_made",
    ),
    Mutant(
        "a spent budget is one rank's own affair",
        "training/loop.py",
        "if any_spent:",
        "if False:",
        "tests/training/test_loop.py::test_a_spent_budget_stops_all_ranks_once_what_is_under_way_is_there",
    ),
    # Checks of requests
    Mutant(
        "a body is as long as it says",
        "serving/requests/request_body.py",
        "if size > max_bytes:",
        "if False:",
        f"{HOSTILE}::test_what_is_too_long_is_refused_for_that[own-a body that is too long without saying]",
    ),
    Mutant(
        "an id may stand twice",
        "serving/requests/decoding.py",
        "or len({item.id for item in batch.items}) != len(batch.items)",
        "or not batch.items",
        f"{HOSTILE}::test_documents[own-an id twice]",
    ),
    Mutant(
        "any token will do",
        "serving/middleware.py",
        'hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), self._token)',
        "bool(given)",
        f"{SERVER}::test_without_its_token_only_the_health_pages_answer",
    ),
    # Judging
    Mutant(
        "one bad sample fails its whole batch",
        "serving/scoring.py",
        "if len(samples) == 1:",
        "if samples:",
        f"{SERVER}::test_a_reward_that_fails_on_one_sample_scores_the_others[own-raise-scores0-errors0]",
    ),
    Mutant(
        "what nobody waits for is judged",
        "serving/batching.py",
        "if request.done.done():\n                continue",
        "if False:\n                continue",
        f"{SERVER}::test_a_deadline_that_passed_is_an_error_and_its_samples_are_not_judged",
    ),
    Mutant(
        "a server that stops takes new requests",
        "serving/service.py",
        "if self.draining:",
        "if False:",
        f"{SERVER}::test_what_is_in_hand_is_answered_while_draining_and_what_is_new_is_refused",
    ),
    # Limits before authentication
    Mutant(
        "headers have all the time",
        "serving/requests/connections.py",
        'self._deadline = self.loop.call_later(self._limits.header_seconds, self._refuse, "too_slow")',
        "pass",
        f"{CONNECTIONS}::test_headers_that_do_not_arrive_end_the_connection",
    ),
    Mutant(
        "each byte of a header buys more time",
        "serving/requests/connections.py",
        "if not self._in_request and not self._expecting:",
        "if not self._in_request:",
        f"{CONNECTIONS}::test_headers_that_drip_have_no_more_time",
    ),
    Mutant(
        "a slow connection keeps its place",
        "serving/requests/connections.py",
        "if oldest is None:\n                return False",
        "if True:\n                return False",
        f"{CONNECTIONS}::test_many_slow_connections_do_not_make_it_deaf",
    ),
    Mutant(
        "a connection with a request is replaced",
        "serving/requests/connections.py",
        "self._in_request, self._expecting = True, False\n        self._counted.waits(self, waiting=False)",
        "self._in_request, self._expecting = True, False",
        f"{CONNECTIONS}::test_a_connection_with_a_request_in_progress_is_not_replaced",
    ),
    Mutant(
        "headers of any number",
        "serving/requests/connections.py",
        "if self._header_lines > self._limits.max_headers or self._header_bytes > self._limits.max_header_bytes:",
        "if False:",
        f"{CONNECTIONS}::test_headers_without_end_are_refused_early",
    ),
    Mutant(
        "a body goes on after the reply",
        "serving/requests/connections.py",
        "self._end_by(_LINGER_SECONDS)",
        "pass",
        f"{CONNECTIONS}::test_a_body_that_goes_on_after_the_reply_is_given_up",
    ),
    Mutant(
        "no descriptors in reserve",
        "serving/requests/connections.py",
        "soft - _RESERVE - (",
        "soft - (",
        f"{CONNECTIONS}::test_a_server_with_few_file_descriptors_keeps_some",
    ),
    Mutant(
        "any Host",
        "rewards/wire/hosts.py",
        '(f"http://{hosts[0]}", *origins)',
        "origins",
        f"{CONNECTIONS}::test_another_host_is_no_way_in_without_a_token",
    ),
    Mutant(
        "pages of any origin",
        "rewards/wire/hosts.py",
        '(f"http://{hosts[0]}", *origins)',
        '(f"http://{hosts[0]}",)',
        f"{CONNECTIONS}::test_another_host_is_no_way_in_without_a_token",
    ),
    Mutant(
        "images count only until they are decoded",
        "serving/requests/memory.py",
        "weakref.finalize(image, self.release, count).atexit = False",
        "self.release(count)",
        f"{CONNECTIONS}::test_a_budget_of_memory_counts_from_any_thread_and_gives_back",
    ),
    Mutant(
        "memory without a limit",
        "serving/requests/memory.py",
        "if self._settle() + count > self._most:",
        "if False:",
        f"{CONNECTIONS}::test_bodies_count_too",
    ),
    Mutant(
        "every line is logged",
        "serving/requests/log_rate.py",
        "if own < 1 or every < 1:",
        "if False:",
        f"{CONNECTIONS}::test_a_log_is_written_at_a_bounded_rate",
    ),
    Mutant(
        "many kinds of lines fill the log",
        "serving/requests/log_rate.py",
        "if own < 1 or every < 1:",
        "if own < 1:",
        f"{CONNECTIONS}::test_a_log_is_written_at_a_bounded_rate",
    ),
)
