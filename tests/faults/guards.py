"""Every guard that mutants.py takes away in turn: its mark in the source, what is done to it, and the tests that miss it.

A guard is marked `# guard: id` at the end of its line, or on a line of its own above it. Several lines may have one
mark: they are taken together.
"""

from typing import NamedTuple


class Guard(NamedTuple):
    id: str
    """As in the mark."""
    what: str
    tests: str
    """Words for pytest: at least one of these tests must fail without the guard."""
    swap: tuple[str, str] | None = None
    """What in the marked line is replaced, and by what."""
    new: str = ""
    """What stands in the place of the marked lines; nothing by default. Its indentation is theirs."""
    before: str = ""
    """What is put before the marked line, which stays."""
    after: str = ""
    """What is put after the marked line, which stays."""


GUARDS = (
    Guard(id="fsync-files", what="fsync of files", tests="tests/faults/test_storage.py -k loss_of_power"),
    Guard(
        id="fsync-folders", what="fsync of folders", tests="tests/faults/test_storage.py -k loss_of_power", new="pass"
    ),
    Guard(
        id="rename-waited-for", what="the rename is waited for", tests="tests/faults/test_storage.py -k loss_of_power"
    ),
    Guard(
        id="files-waited-for-before-rename-folder",
        what="the files are waited for before the rename (folder)",
        tests="tests/faults/test_storage.py -k loss_of_power",
    ),
    Guard(
        id="folder-killed-process-made-synced",
        what="a folder that a killed process made is synced",
        tests="tests/faults/test_storage.py -k after_a_kill",
        swap=("sync", "    sync"),
    ),
    Guard(
        id="folders-above-run-s-folder-synced",
        what="folders above a run's folder are synced",
        tests="tests/faults/test_storage.py -k those_that_it_lies_in",
        swap=("make", "os.mkdir"),
    ),
    Guard(
        id="rounds-jsonl-aside",
        what="rounds.jsonl aside",
        tests="tests/faults/test_storage.py -k loses_power",
        new="remove(folder, name)\nwrite(folder, name, data)",
    ),
    Guard(
        id="put-cleans-up", what="put cleans up", tests="tests/faults/test_storage.py -k fails_at_its_end", new="pass"
    ),
    Guard(
        id="what-killed-save-left-removed-first",
        what="what a killed save left is removed first",
        tests="tests/faults/test_kills.py -k every_operation",
    ),
    Guard(
        id="same-state-again-replaced",
        what="a state that is saved again takes the place of the first",
        tests="tests/faults/test_storage.py -k need_not_be_allowed_again",
    ),
    Guard(
        id="short-writes",
        what="short writes",
        tests="tests/faults/test_storage.py -k whichever",
        new="os.write(handle, left)",
    ),
    Guard(
        id="checksum-files",
        what="checksum of files",
        tests="tests/faults/test_storage.py -k two_thousand",
        new="if False:",
    ),
    Guard(
        id="checksum-memories",
        what="checksum of memories",
        tests="tests/faults/test_storage.py -k two_thousand",
        new="if False:",
    ),
    Guard(
        id="checksum-manifest",
        what="checksum of the manifest",
        tests="tests/faults/test_storage.py -k two_thousand",
        new="if False:",
    ),
    Guard(
        id="end-manifest",
        what="end of the manifest",
        tests="tests/faults/test_storage.py -k longer_and_swapped",
        swap=("digest or rest", "digest"),
    ),
    Guard(
        id="manifest-another-round",
        what="a manifest of another round",
        tests="tests/faults/test_storage.py -k under_the_name",
        new="if False:",
    ),
    Guard(
        id="checks-before-parsing",
        what="checks before parsing",
        tests="tests/faults/test_storage.py -k two_thousand",
        new="server = moved(wire.decode(files[SERVER], federation.initial_server), federation.runtime.device)\nshards = verify.shards_of(folder, manifest)",
    ),
    Guard(
        id="all-damaged-error",
        what="all damaged is an error",
        tests="tests/faults/test_storage.py -k all_damaged",
        swap=("damages", "False"),
    ),
    Guard(
        id="checkpoint-before-kept",
        what="the checkpoint before is kept",
        tests="tests/faults/test_storage.py -k goes_on_from",
        swap=("2", "1"),
    ),
    Guard(
        id="memories-before-checkpoint-names-them",
        what="memories before the checkpoint that names them",
        tests="tests/faults/test_storage.py -k loss_of_power",
        new="disk.put_folder(own, name, files)\nif states:\n    disk.put(memories, shard.name, kept)",
    ),
    Guard(
        id="failed-save-said",
        what="a failed save is said",
        tests="tests/faults/test_storage.py -k whichever",
        new="log.debug(_could_not_save(folder, target, size, error))",
    ),
    Guard(
        id="swallowed-permissionerror",
        what="a swallowed PermissionError",
        tests="tests/faults/test_storage.py -k whichever",
        before="except PermissionError:\n    pass",
    ),
    Guard(
        id="bytes-write",
        what="bytes to write",
        tests="tests/faults/test_storage.py -k whichever",
        swap=(" + sum(map(len, files.values()))", ""),
    ),
    Guard(
        id="failed-save-cleaned-up",
        what="a failed save is cleaned up",
        tests="tests/faults/test_storage.py -k whichever",
    ),
    Guard(
        id="memories-checkpoint-names-stay",
        what="memories that a checkpoint names stay",
        tests="tests/faults/test_storage.py -k loss_of_power",
        new="if True:",
    ),
    Guard(
        id="memories-nobody-names-go",
        what="memories that nobody names go",
        tests="tests/faults/test_storage.py -k two_thousand",
        new="if False:",
    ),
    Guard(
        id="other-formats",
        what="other formats",
        tests="tests/faults/test_storage.py -k other_networks",
        new="if False:",
    ),
    Guard(
        id="other-versions",
        what="other versions",
        tests="tests/faults/test_storage.py -k other_networks",
        new="if False:",
    ),
    Guard(
        id="other-networks",
        what="other networks",
        tests="tests/faults/test_storage.py -k other_networks",
        swap=("changed", "False"),
    ),
    Guard(
        id="other-settings",
        what="other settings",
        tests="tests/faults/test_storage.py -k decides_a_result",
        swap=("refused", "False"),
    ),
    Guard(
        id="other-runtime",
        what="a runtime that gives other bits",
        tests="tests/runs/test_resuming.py -k gives_other_bits",
        swap=("refused", "False"),
    ),
    Guard(
        id="run-folder-imports-nothing",
        what="the configuration of a run folder imports nothing",
        tests="tests/runs/test_user_classes.py -k run_folder",
        swap=("any(", "False and any("),
    ),
    Guard(
        id="table-imports-nothing",
        what="a table that is in no experiment file imports nothing",
        tests="tests/runs/test_user_classes.py -k no_experiment_file",
        swap=("self.refusal", "False"),
    ),
    Guard(
        id="section-not-prefix",
        what="a section is not a prefix",
        tests="tests/faults/test_storage.py -k allows_no_other",
        swap=('f"{one}."', "one"),
    ),
    Guard(
        id="old-configuration-stays",
        what="the old configuration stays",
        tests="tests/faults/test_storage.py -k decides_a_result",
    ),
    Guard(id="lock", what="the lock", tests="tests/faults/test_kills.py -k hundred_times", new="pass"),
    Guard(
        id="note-another-machine",
        what="a note of another machine",
        tests="tests/faults/test_kills.py -k another_machine",
        swap=("not steal", "False"),
    ),
    Guard(
        id="steal-lock",
        what="--steal-lock",
        tests="tests/faults/test_kills.py -k another_machine",
        swap=("holder and not steal", "holder"),
    ),
    Guard(
        id="failed-run-gives-folder-back",
        what="a failed run gives its folder back",
        tests="tests/faults/test_kills.py -k given_back",
        new="yield Lock(path, handle)\nos.ftruncate(handle, 0)",
    ),
    Guard(
        id="done-only-when-last-state-durable",
        what="done only when the last state is durable",
        tests="tests/faults/test_storage.py -k called_done",
        new="pass",
    ),
    Guard(
        id="run-may-go-on-fails-at-end",
        what="a run that may go on fails at its end",
        tests="tests/faults/test_storage.py -k fails_at_its_end",
    ),
    Guard(
        id="later-save-makes-up", what="a later save makes up", tests="tests/faults/test_storage.py -k may_go_on_says"
    ),
    Guard(id="failed-save-loud", what="a failed save is loud", tests="tests/faults/test_storage.py -k may_go_on_says"),
    Guard(id="stop-default", what="stop is the default", tests="tests/faults/test_storage.py -k may_not_go_on"),
    Guard(
        id="rounds-those-checkpoint",
        what="rounds are those of the checkpoint",
        tests="tests/faults/test_storage.py -k called_done",
    ),
    Guard(
        id="config-toml-before-first-state",
        what="config.toml before the first state",
        tests="tests/faults/test_storage.py -k loses_power",
        new="pass",
    ),
    Guard(
        id="monotonic-deadlines",
        what="monotonic deadlines",
        tests="tests/faults/test_long_runs.py -k hour",
        swap=("monotonic", "time() - time.time() + time.monotonic"),
    ),
    Guard(
        id="monotonic-deadlines-workers",
        what="monotonic deadlines of workers",
        tests="tests/faults/test_long_runs.py -k hour",
        swap=("monotonic() ", "monotonic() + time.time() - time.time() "),
    ),
    Guard(
        id="second-signal-ends-at-once",
        what="a second signal ends at once",
        tests="tests/faults/test_kills.py -k second_signal",
    ),
    Guard(id="grace-ends", what="the grace ends", tests="tests/faults/test_kills.py -k longer_than_the_grace"),
    Guard(
        id="exit-codes-signals",
        what="exit codes of signals",
        tests="tests/faults/test_kills.py -k first_signal",
        swap=("stop.exit_code", "130"),
    ),
    Guard(
        id="first-signal-waits-for-round",
        what="the first signal waits for the round",
        tests="tests/faults/test_kills.py -k first_signal",
        before="end_at_once(number, frame)",
    ),
    Guard(
        id="memories-not-all-held",
        what="memories are not all held",
        tests="tests/faults/test_scale.py -m slow",
        swap=("256 * 2**20", "2**40"),
    ),
    Guard(
        id="save-writes-round-s-memories-only",
        what="a save writes its round's memories only",
        tests="tests/faults/test_scale.py -k thousand_clients_fit",
        new="done = set()",
    ),
    Guard(
        id="handles-closed",
        what="handles are closed",
        tests="tests/faults/test_long_runs.py -k hundred_rounds",
        new="pass",
    ),
    Guard(
        id="no-environment-variable-written",
        what="no environment variable is written",
        tests="tests/faults/test_secrets.py",
        new='"command": " ".join([*sys.argv, *os.environ.values()]),',
    ),
    Guard(
        id="no-value-example-failure",
        what="no value of an example is in a failure",
        tests="tests/faults/test_secrets.py",
        swap=("error} ", "error} {list(traceback.walk_tb(error.__traceback__))[-1][0].f_locals} "),
    ),
    Guard(
        id="another-run-or-other-files",
        what="another run or other files",
        tests="tests/faults/test_storage.py -k harmless_change_lets",
        swap=("then != now", "False"),
    ),
    Guard(
        id="rounds-without-checkpoint",
        what="rounds without a checkpoint",
        tests="tests/faults/test_storage.py -k all_gone",
        new="if False:",
    ),
    Guard(
        id="allowed-change-saved",
        what="an allowed change is saved",
        tests="tests/faults/test_storage.py -k need_not_be_allowed_again",
    ),
    Guard(
        id="signal-handler-says-ready-bytes",
        what="a signal handler says ready bytes",
        tests="tests/faults/test_kills.py -k whatever_it_interrupts",
        new="err.print(wish)",
    ),
    Guard(
        id="renormalisation-over-those-replied",
        what="renormalisation over those that replied",
        tests="tests/faults/test_participation.py -k dropping_out_exactly",
        swap=("+= weight", "= max(self._weight, weight)"),
    ),
    Guard(id="no-name-twice-file", what="no name twice in a file", tests="tests/test_wire.py", new="if False:"),
    Guard(
        id="losses-weights-not-finite-noticed",
        what="losses and weights that are not finite are noticed",
        tests="tests/runtimes/test_divergence.py",
        new="return [True for _ in fits]",
    ),
    Guard(
        id="server-s-state-finite",
        what="the server's state is finite",
        tests="tests/runtimes/test_divergence.py",
        swap=("bad", "False"),
    ),
    Guard(
        id="no-unknown-key",
        what="no unknown key",
        tests="tests/faults/test_config_faults.py -k ignored",
        swap=("unknown", "False"),
    ),
    Guard(id="nesting-bounded", what="nesting is bounded", tests="tests/faults/test_config_faults.py -k hostile"),
    Guard(
        id="images-have-largest-size",
        what="images have a largest size",
        tests="tests/faults/test_data_faults.py -k pixels",
        swap=("MAX_PIXELS", "40 * MAX_PIXELS"),
    ),
    Guard(
        id="links-out-folder", what="links out of a folder", tests="tests/faults/test_data_faults.py", new="if False:"
    ),
    Guard(
        id="message-another-run-refused",
        what="a message of another run is refused",
        tests="tests/engine/test_collector.py -k something_else",
        new="if False:",
    ),
    Guard(
        id="message-another-round-phase-or-call-refused",
        what="a message of another round, phase or call is refused",
        tests="tests/faults/test_participation.py -k next_round_is_stale",
        new="if False:",
    ),
    Guard(
        id="message-this-phase",
        what="a message is of this phase",
        tests="tests/engine/test_collector.py -k something_else",
        new="if ticket.round != self._ticket.round:",
    ),
    Guard(
        id="message-for-another-model-refused",
        what="a message for another model is refused",
        tests="tests/faults/test_participation.py -k something_else",
        new="if False:",
    ),
    Guard(
        id="at-most-once-second-message-refused",
        what="at most once: a second message is refused",
        tests="tests/engine/test_collector.py -k duplicates",
    ),
    Guard(
        id="late-message-refused",
        what="a late message is refused",
        tests="tests/engine/test_collector.py -k after_the_deadline",
    ),
    Guard(
        id="late-reply-refused",
        what="a late reply is refused",
        tests="tests/faults/test_participation.py -k nobody_more_is_asked",
        new="elif False:",
    ),
    Guard(
        id="message-within-bounds",
        what="a message is within its bounds",
        tests="tests/engine/test_collector.py -k nothing_better",
    ),
    Guard(
        id="refused-messages-counted-once",
        what="refused messages are counted once",
        tests="tests/engine/test_collector.py -k counted_once",
    ),
    Guard(
        id="sort-replies-canonical-order",
        what="sort: replies are in canonical order",
        tests="tests/faults/test_participation.py -k fifty_orders",
        new="for arrived in list(self._early):\n    yield arrived, self._early.pop(arrived)",
    ),
    Guard(
        id="ticket-s-fields-have-their-types",
        what="a ticket's fields have their types",
        tests="tests/engine/test_message.py -k no_ticket",
        new="if False:",
    ),
    Guard(
        id="total-size-bounded",
        what="a total size is bounded",
        tests="tests/engine/test_message.py -k one_byte_more",
        new="if False:",
    ),
    Guard(
        id="header-s-size-bounded",
        what="a header's size is bounded",
        tests="tests/engine/test_message.py -k one_byte_more",
        new="if False:",
    ),
    Guard(
        id="bounds-checked-before-envelope-opened",
        what="bounds are checked before an envelope is opened",
        tests="tests/engine/test_message.py -k before_it_is_opened",
    ),
    Guard(
        id="header-compared-with-what-was-asked-for",
        what="a header is compared with what was asked for",
        tests="tests/engine/test_message.py -k header_claims",
    ),
    Guard(
        id="what-message-says-printable",
        what="what a message says is printable",
        tests="tests/faults/test_uploads.py -k ten_thousand",
        new="return text[:MOST_TOLD]",
    ),
    Guard(
        id="digest-shapes",
        what="the digest is of shapes",
        tests="tests/engine/test_message.py -k digest",
        swap=(", list(leaf.shape)", ""),
    ),
    Guard(id="deep-nesting-refused", what="deep nesting is refused", tests="tests/faults/test_uploads.py -k deep"),
    Guard(id="finite-check", what="finite check", tests="tests/faults/test_uploads.py -k NaN", new="if False:"),
    Guard(
        id="values-looked-at",
        what="values are looked at",
        tests="tests/faults/test_uploads.py -k ten_thousand",
        new="if False:",
    ),
    Guard(
        id="closer-look-for-what-too-large-for-float32",
        what="a closer look for what is too large for float32",
        tests="tests/faults/test_uploads.py -k float32",
        swap=("~(norms <= limit", "(norms > limit) & norms.isfinite("),
    ),
    Guard(id="norm-bounded", what="the norm is bounded", tests="tests/faults/test_uploads.py -k norm", new="if False:"),
    Guard(
        id="shape-check",
        what="shape check",
        tests="tests/faults/test_uploads.py -k dimension",
        swap=("shape != like.shape", "numel() != like.numel()"),
    ),
    Guard(
        id="type-check",
        what="type check",
        tests="tests/faults/test_uploads.py -k float64",
        swap=("dtype != like.dtype", "is_floating_point() != like.is_floating_point()"),
    ),
    Guard(
        id="counts-not-negative",
        what="counts are not negative",
        tests="tests/faults/test_uploads.py -k ten_thousand",
        new="if False:",
    ),
    Guard(id="counts-whole", what="counts are whole", tests="tests/faults/test_uploads.py -k 2.5", new="if False:"),
    Guard(
        id="counts-at-most-enrolled",
        what="counts are at most the enrolled",
        tests="tests/faults/test_uploads.py -k enrolled",
        new="if False:",
    ),
    Guard(id="labels-classes", what="labels are classes", tests="tests/faults/test_uploads.py -k V6", new="if False:"),
    Guard(
        id="prototype-has-count",
        what="a prototype has a count",
        tests="tests/faults/test_uploads.py -k V7",
        new="if False:",
    ),
    Guard(
        id="unexpected-names-refused",
        what="unexpected names are refused",
        tests="tests/faults/test_uploads.py -k extra",
        new="if False:",
    ),
    Guard(
        id="what-remembered-finite",
        what="what is remembered is finite",
        tests="tests/faults/test_uploads.py -k would_remember",
        new='bad = ""',
    ),
    Guard(
        id="memory-kept-only-accepted-uploads",
        what="memory is kept only of accepted uploads",
        tests="tests/faults/test_uploads.py -k costs_its_client",
        swap=(
            "if not isinstance(upload, Failure):",
            "if self._receipts.update({client: outcome.receipt}) or not isinstance(upload, Failure):",
        ),
    ),
    Guard(
        id="too-few-replies-abandon-round",
        what="too few replies abandon the round",
        tests="tests/faults/test_participation.py -k too_few",
        new="if False:",
    ),
    Guard(
        id="as-many-replies-as-needed-enough",
        what="as many replies as needed are enough",
        tests="tests/faults/test_participation.py -k too_few",
        swap=("<", "<="),
    ),
    Guard(
        id="nobody-asked-after-deadline",
        what="nobody is asked after the deadline",
        tests="tests/faults/test_participation.py -k nobody_more",
    ),
    Guard(
        id="troubles-no-strikes",
        what="troubles are no strikes",
        tests="tests/faults/test_uploads.py -k honest",
        swap=("if failure.reason not in NOT_THE_CLIENTS_FAULT", ""),
    ),
    Guard(
        id="good-upload-makes-up-for-refusals",
        what="a good upload makes up for refusals",
        tests="tests/faults/test_uploads.py -k three_refusals",
        swap=("if client not in self._good - struck", ""),
    ),
    Guard(
        id="quarantine-logged",
        what="quarantine is logged",
        tests="tests/faults/test_uploads.py -k quarantine_is_logged",
        new="if False:",
    ),
    Guard(
        id="refusals-messages-counted",
        what="refusals of messages are counted",
        tests="tests/faults/test_participation.py -k duplicate",
    ),
    Guard(
        id="refusals-clients-counted",
        what="refusals of clients are counted",
        tests="tests/faults/test_uploads.py -k ten_thousand",
    ),
    Guard(
        id="client-gets-own-memory",
        what="a client gets its own memory",
        tests="tests/faults/test_participation.py -k another_keeps",
        swap=("receipts.get(client))", "receipts.get(min(state.receipts, default=client)))"),
    ),
    Guard(
        id="memories-committed-when-round-ends",
        what="memories are committed when the round ends",
        tests="tests/faults/test_participation.py -k 'too_few or second_attempt'",
        after="self._state.receipts[client] = outcome.receipt",
    ),
    Guard(
        id="quarantine",
        what="quarantine",
        tests="tests/faults/test_uploads.py -k three_refusals",
        new="left = tuple(ids)",
    ),
    Guard(
        id="all-quarantine-ends-run",
        what="all in quarantine ends the run",
        tests="tests/faults/test_uploads.py -k in_quarantine_ends",
        swap=("not left", "False"),
    ),
    Guard(
        id="more-asked-than-needed",
        what="more are asked than needed",
        tests="tests/faults/test_participation.py -k more_clients",
        swap=("ceil(target * self.training.over_selection - 1e-9)", "target"),
    ),
    Guard(
        id="over-selection-rounded-up-but-not-noise",
        what="over-selection is rounded up, but not by noise",
        tests="tests/faults/test_participation.py -k more_clients",
        swap=("over_selection -", "over_selection +"),
    ),
    Guard(
        id="round-tried-again",
        what="a round is tried again",
        tests="tests/faults/test_participation.py -k 'too_few or second_attempt'",
        swap=("self.training.attempts", "1"),
    ),
    Guard(
        id="another-attempt-draws-anew",
        what="another attempt draws anew",
        tests="tests/faults/test_participation.py -k another_attempt",
        swap=(" attempt) if attempt else (round,", ""),
    ),
    Guard(
        id="abandoned-round-logged",
        what="an abandoned round is logged",
        tests="tests/faults/test_participation.py -k too_few",
        new="pass",
    ),
    Guard(
        id="mean-no-weight-abandons-round",
        what="a mean of no weight abandons the round",
        tests="tests/faults/test_participation.py -k without_any_weight",
        new="if False:",
    ),
    Guard(
        id="renormalisation-classes-over-their-holders",
        what="renormalisation: classes over their holders",
        tests="tests/faults/test_participation.py -k third",
        swap=("count.clamp", "count.sum().expand_as(count).clamp"),
    ),
    Guard(
        id="class-without-reply-keeps-prototype",
        what="a class without a reply keeps its prototype",
        tests="tests/faults/test_participation.py -k class_without",
        new="mean,",
    ),
    Guard(
        id="float64-sums",
        what="float64 sums",
        tests="tests/faults/test_participation.py -k third",
        swap=("float64", "float32"),
    ),
    Guard(
        id="work-past-deadline-ended",
        what="work past the deadline is ended",
        tests="tests/faults/test_participation.py -k ten_deadlines",
    ),
    Guard(
        id="step-recorded-late-has-batch",
        what="a step that is recorded late has a batch",
        tests="tests/runtimes/test_cohort.py -k recorded_late",
        swap=("self.buffers.counter.zero_()  ", ""),
    ),
    Guard(
        id="workers-wait-no-longer-than-deadline",
        what="workers wait no longer than the deadline",
        tests="tests/faults/test_participation.py -k ten_deadlines",
        swap=(", _seconds_until(min(b.job.deadline for b in busy.values()))", ""),
    ),
    Guard(
        id="bare-word-no-number",
        what="a bare word is no number",
        tests="tests/faults/test_config_faults.py -k looks_right",
        swap=("strict=True", "strict=False"),
    ),
    Guard(
        id="numbers-finite",
        what="numbers are finite",
        tests="tests/faults/test_config_faults.py -k looks_right",
        swap=("False", "True"),
    ),
    Guard(
        id="configuration-ordinary-file",
        what="a configuration is an ordinary file",
        tests="tests/faults/test_config_faults.py -k hostile",
        swap=("not stat.S_ISREG(facts.st_mode)", "False"),
    ),
    Guard(
        id="configuration-has-largest-size",
        what="a configuration has a largest size",
        tests="tests/faults/test_config_faults.py -k half_a_megabyte",
        new="if False:",
    ),
    Guard(
        id="setting-set-once",
        what="a setting is set once",
        tests="tests/faults/test_config_faults.py -k another_value",
        new="if False:",
    ),
    Guard(
        id="compressed-files-have-largest-ratio",
        what="compressed files have a largest ratio",
        tests="tests/faults/test_data_faults.py -k unfold",
        new="return limit",
    ),
    Guard(
        id="nothing-outside-folder-read",
        what="nothing outside a folder is read",
        tests="tests/faults/test_data_faults.py",
        new="if False:",
    ),
    Guard(
        id="few-images-may-be-damaged",
        what="few images may be damaged",
        tests="tests/faults/test_data_faults.py",
        new="if False:",
    ),
    Guard(
        id="header-file-bounded",
        what="the header of a file is bounded",
        tests="tests/faults/test_hostile_files.py -k million",
        swap=("size > most", "False"),
    ),
    Guard(
        id="links-in-run-folder",
        what="no link in a run's folder is followed",
        tests="tests/faults/test_run_folders.py -k outside_a_run_folder",
        swap=("os.O_NOFOLLOW | ", ""),
    ),
    Guard(
        id="pipes-in-run-folder",
        what="nobody waits for a pipe",
        tests="tests/faults/test_run_folders.py -k 'outside_a_run_folder and pipe'",
        swap=("os.O_NONBLOCK | ", ""),
    ),
    Guard(
        id="ordinary-files-in-run-folder",
        what="what is not a file is not read",
        tests="tests/faults/test_run_folders.py -k not_a_file",
        new="if False:",
    ),
    Guard(
        id="small-files-in-run-folder",
        what="small files are small",
        tests="tests/faults/test_run_folders.py -k small_file",
        new="if False:",
    ),
    Guard(
        id="names-in-run-folder",
        what="a name leads nowhere else",
        tests="tests/faults/test_run_folders.py -k a_name_is_one",
        new="if False:",
    ),
    Guard(
        id="nothing-written-through-links",
        what="nothing is written through a link",
        tests="tests/faults/test_run_folders.py -k never_what_a_link",
        swap=("os.O_EXCL | os.O_NOFOLLOW", "os.O_TRUNC"),
    ),
    Guard(
        id="what-lies-in-the-way-goes",
        what="what lies in the way of a file goes",
        tests="tests/faults/test_kills.py -k every_operation",
    ),
    Guard(
        id="never-half-there",
        what="what is half removed has another name",
        tests="tests/faults/test_kills.py -k every_operation",
        new="remove(folder, name)",
    ),
    Guard(
        id="manifest-has-its-types",
        what="a manifest says what it must",
        tests="tests/faults/test_run_folders.py -k deceive",
        new="if False:",
    ),
    Guard(
        id="manifest-names-its-files",
        what="a manifest names its files and no others",
        tests="tests/faults/test_run_folders.py -k deceive",
        new="if False:",
    ),
    Guard(
        id="manifest-names-its-memories",
        what="a manifest names memories and no other files",
        tests="tests/faults/test_run_folders.py -k deceive",
        new="if False:",
    ),
    Guard(
        id="memories-still-the-same",
        what="memories have not changed when they are named again",
        tests="tests/faults/test_run_folders.py -k 'stops_at_its_next_save'",
        new="if False:",
    ),
    Guard(
        id="memories-checked-whenever-read",
        what="memories are checked whenever they are read",
        tests="tests/faults/test_run_folders.py -k every_flipped_bit",
        new="if False:",
    ),
    Guard(
        id="memories-lost-end-run",
        what="a memory that cannot be read ends the run",
        tests="tests/faults/test_run_folders.py -k never_used",
        new="if False:",
    ),
    Guard(
        id="damaged-set-aside",
        what="a damaged checkpoint is set aside",
        tests="tests/faults/test_run_folders.py -k never_cost",
        new="if False:",
    ),
    Guard(
        id="only-whole-count",
        what="only checkpoints that are whole count",
        tests="tests/faults/test_run_folders.py -k save_that_fails_removes",
        swap=(" if name in whole", ""),
    ),
    Guard(
        id="memories-of-damaged-stay",
        what="memories of a damaged checkpoint stay",
        tests="tests/faults/test_run_folders.py -k save_that_fails_removes",
        swap=("counted == names", "True"),
    ),
    Guard(
        id="lock-has-no-other-name",
        what="a lock is no other file",
        tests="tests/faults/test_run_folders.py -k also_somebodys",
        new="if False:",
    ),
    Guard(
        id="folder-still-there",
        what="the folder is the one that was locked",
        tests="tests/faults/test_run_folders.py -k folder_that_goes",
        new="if False:",
    ),
    Guard(
        id="no-locks-named",
        what="a file system without locks is named",
        tests="tests/faults/test_run_folders.py -k without_locks",
        swap=("OSError", "BlockingIOError"),
    ),
    Guard(
        id="rounds-have-their-checksum",
        what="rounds.jsonl is what was saved",
        tests="tests/faults/test_run_folders.py -k finished_run_is_named",
        new="if False:",
    ),
    Guard(
        id="rounds-damaged",
        what="a line that is no round is named",
        tests="tests/faults/test_run_folders.py -k no_round",
        swap=("(ValueError, TypeError, RecursionError)", "ZeroDivisionError"),
    ),
    Guard(
        id="environment-damaged",
        what="a damaged environment.json is named",
        tests="tests/faults/test_run_folders.py -k finished_run_is_named",
        swap=("(ValueError, RecursionError)", "ZeroDivisionError"),
    ),
    Guard(
        id="configuration-damaged",
        what="a damaged config.toml is named",
        tests="tests/faults/test_run_folders.py -k finished_run_is_named",
        swap=("BadInput", "ZeroDivisionError"),
    ),
    Guard(
        id="configuration-empty",
        what="an empty config.toml is named",
        tests="tests/faults/test_run_folders.py -k resumed_is_named",
        new="if False:",
    ),
    Guard(
        id="damaged-folder-costs-its-run",
        what="a damaged folder costs its run alone",
        tests="tests/faults/test_run_folders.py -k one_bad_folder",
        swap=("BadInput", "ZeroDivisionError"),
    ),
    Guard(
        id="git-runs-no-program",
        what="git runs no program of a repository's",
        tests="tests/faults/test_run_folders.py -k git_runs",
        swap=("*NO_PROGRAMS, ", ""),
    ),
    Guard(
        id="output-full-named",
        what="a full standard output is named",
        tests="tests/faults/test_run_folders.py -k cannot_be_printed",
        swap=("OSError", "ZeroDivisionError"),
    ),
    Guard(
        id="pictures-not-through-links",
        what="a picture is not written through a link",
        tests="tests/faults/test_run_folders.py -k picture",
        new="path.write_bytes(drawn.getvalue())",
    ),
)
