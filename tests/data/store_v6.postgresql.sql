CREATE TABLE assignments (
	seq BIGSERIAL NOT NULL, 
	agent TEXT NOT NULL, 
	attempt_id TEXT NOT NULL, 
	policy TEXT NOT NULL, 
	number INTEGER NOT NULL, 
	at_ns BIGINT NOT NULL, 
	PRIMARY KEY (seq), 
	UNIQUE (attempt_id, agent)
);
CREATE TABLE attempts (
	fence BIGSERIAL NOT NULL, 
	attempt_id TEXT NOT NULL, 
	rollout_id TEXT NOT NULL, 
	number INTEGER NOT NULL, 
	worker TEXT NOT NULL, 
	status TEXT NOT NULL, 
	lease_until_ns BIGINT NOT NULL, 
	started_ns BIGINT NOT NULL, 
	ended_ns BIGINT, 
	error TEXT, 
	PRIMARY KEY (fence), 
	UNIQUE (attempt_id)
);
CREATE INDEX attempts_running ON attempts (lease_until_ns) WHERE status = 'running';
CREATE INDEX ix_attempts_rollout_id ON attempts (rollout_id);
CREATE TABLE calls (
	seq BIGSERIAL NOT NULL, 
	call_id TEXT NOT NULL, 
	response_id TEXT NOT NULL, 
	trace_id TEXT, 
	span_id TEXT, 
	rollout_id TEXT, 
	attempt_id TEXT, 
	agent TEXT, 
	policy TEXT NOT NULL, 
	policy_version BIGINT NOT NULL, 
	start_ns BIGINT NOT NULL, 
	end_ns BIGINT NOT NULL, 
	error TEXT, 
	prompt_token_ids BYTEA, 
	request TEXT NOT NULL, 
	sampling TEXT NOT NULL, 
	origin TEXT DEFAULT 'training' NOT NULL, 
	PRIMARY KEY (seq), 
	UNIQUE (call_id)
);
CREATE INDEX calls_by_attempt_id ON calls (attempt_id) WHERE attempt_id IS NOT NULL;
CREATE INDEX calls_by_origin ON calls (origin, start_ns) WHERE origin <> 'training';
CREATE INDEX calls_by_rollout_id ON calls (rollout_id) WHERE rollout_id IS NOT NULL;
CREATE INDEX ix_calls_trace_id ON calls (trace_id);
CREATE TABLE choices (
	call_id TEXT NOT NULL, 
	position INTEGER NOT NULL, 
	choice_index INTEGER NOT NULL, 
	token_ids BYTEA, 
	logprobs BYTEA, 
	finish_reason TEXT, 
	message TEXT NOT NULL, 
	PRIMARY KEY (call_id, position)
);
CREATE TABLE consumed_groups (
	group_id TEXT NOT NULL, 
	consumer TEXT NOT NULL, 
	consumed_ns BIGINT NOT NULL, 
	PRIMARY KEY (group_id)
);
CREATE TABLE deployments (
	seq BIGSERIAL NOT NULL, 
	agent TEXT NOT NULL, 
	number INTEGER NOT NULL, 
	stage TEXT NOT NULL, 
	stable TEXT NOT NULL, 
	candidate TEXT, 
	previous TEXT, 
	share DOUBLE PRECISION NOT NULL, 
	checkpoint TEXT, 
	base TEXT, 
	reason TEXT NOT NULL, 
	actor TEXT NOT NULL, 
	at_ns BIGINT NOT NULL, 
	details TEXT NOT NULL, 
	PRIMARY KEY (seq), 
	UNIQUE (agent, number)
);
CREATE TABLE lease_clock (
	id INTEGER NOT NULL, 
	now_ns BIGINT NOT NULL, 
	wrote_ns BIGINT DEFAULT 0 NOT NULL, 
	PRIMARY KEY (id)
);
CREATE TABLE rewards (
	seq BIGSERIAL NOT NULL, 
	reward_id TEXT NOT NULL, 
	rollout_id TEXT NOT NULL, 
	attempt_id TEXT NOT NULL, 
	value DOUBLE PRECISION NOT NULL, 
	agent TEXT, 
	span_id TEXT, 
	source TEXT NOT NULL, 
	given_ns BIGINT, 
	choice INTEGER, 
	PRIMARY KEY (seq), 
	UNIQUE (reward_id)
);
CREATE INDEX rewards_by_attempt_id ON rewards (attempt_id) WHERE attempt_id IS NOT NULL;
CREATE INDEX rewards_by_rollout_id ON rewards (rollout_id) WHERE rollout_id IS NOT NULL;
CREATE TABLE rollouts (
	seq BIGSERIAL NOT NULL, 
	rollout_id TEXT NOT NULL, 
	group_id TEXT NOT NULL, 
	task TEXT NOT NULL, 
	mode TEXT NOT NULL, 
	max_attempts INTEGER NOT NULL, 
	timeout_s DOUBLE PRECISION, 
	status TEXT NOT NULL, 
	tries INTEGER NOT NULL, 
	queued_ns BIGINT NOT NULL, 
	origin TEXT DEFAULT 'training' NOT NULL, 
	replay TEXT, 
	PRIMARY KEY (seq), 
	UNIQUE (rollout_id)
);
CREATE INDEX ix_rollouts_group_id ON rollouts (group_id);
CREATE INDEX rollouts_queued ON rollouts (seq) WHERE status = 'queued';
CREATE TABLE schema_version (
	version INTEGER NOT NULL, 
	applied_ns BIGINT NOT NULL, 
	PRIMARY KEY (version)
);
CREATE TABLE spans (
	seq BIGSERIAL NOT NULL, 
	trace_id TEXT NOT NULL, 
	span_id TEXT NOT NULL, 
	parent_id TEXT, 
	operation TEXT NOT NULL, 
	name TEXT NOT NULL, 
	agent TEXT, 
	rollout_id TEXT, 
	attempt_id TEXT, 
	start_ns BIGINT NOT NULL, 
	end_ns BIGINT NOT NULL, 
	status TEXT NOT NULL, 
	status_message TEXT NOT NULL, 
	attributes TEXT NOT NULL, 
	origin TEXT DEFAULT 'training' NOT NULL, 
	PRIMARY KEY (seq)
);
CREATE INDEX spans_by_attempt_id ON spans (attempt_id) WHERE attempt_id IS NOT NULL;
CREATE UNIQUE INDEX spans_by_id ON spans (trace_id, span_id, coalesce(attempt_id, ''));
CREATE INDEX spans_by_origin ON spans (origin, start_ns) WHERE origin <> 'training';
CREATE INDEX spans_by_rollout_id ON spans (rollout_id) WHERE rollout_id IS NOT NULL;
INSERT INTO assignments (seq, agent, attempt_id, policy, number, at_ns) VALUES (1, 'writer', 'rollout 1.1', 'policy', 1, 1795360472841751420);
INSERT INTO attempts (fence, attempt_id, rollout_id, number, worker, status, lease_until_ns, started_ns, ended_ns, error) VALUES (1, 'rollout 1.1', 'rollout 1', 1, 'worker', 'succeeded', 1795196543046894108, 1795196483049311806, 1795196483080152288, NULL);
INSERT INTO calls (seq, call_id, response_id, trace_id, span_id, rollout_id, attempt_id, agent, policy, policy_version, start_ns, end_ns, error, prompt_token_ids, request, sampling, origin) VALUES (1, 'call 1', 'chatcmpl-1', '0af7651916cd43dd8448eb211c80319c', 'b7ad6b7169203331', 'rollout 1', 'rollout 1.1', 'writer', 'policy', 3, 1790000000000000001, 1790000000000000002, NULL, '\x0100000002000000'::bytea, '{"model":"policy"}', '{"temperature":1.0}', 'training');
INSERT INTO choices (call_id, position, choice_index, token_ids, logprobs, finish_reason, message) VALUES ('call 1', 0, 0, '\x0300000004000000'::bytea, '\x9a9999999999b9bf000000000000d0bf'::bytea, 'stop', '{"role":"assistant","content":"4"}');
INSERT INTO choices (call_id, position, choice_index, token_ids, logprobs, finish_reason, message) VALUES ('call 1', 1, 1, '\x050000000600000007000000'::bytea, '\x000000000000e0bf000000000000e0bf000000000000e0bf'::bytea, 'length', '{}');
INSERT INTO consumed_groups (group_id, consumer, consumed_ns) VALUES ('group 1', 'run 1, step 1', 1795196483085507770);
INSERT INTO deployments (seq, agent, number, stage, stable, candidate, previous, share, checkpoint, base, reason, actor, at_ns, details) VALUES (1, 'writer', 1, 'stable', 'policy', NULL, NULL, 0.0, NULL, NULL, 'the first one', 'operator', 1795360472841751420, '{}');
INSERT INTO lease_clock (id, now_ns, wrote_ns) VALUES (1, 1795196483046894108, 0);
INSERT INTO rewards (seq, reward_id, rollout_id, attempt_id, value, agent, span_id, source, given_ns, choice) VALUES (1, 'reward 1', 'rollout 1', 'rollout 1.1', 0.1, NULL, NULL, 'run', NULL, NULL);
INSERT INTO rollouts (seq, rollout_id, group_id, task, mode, max_attempts, timeout_s, status, tries, queued_ns, origin, replay) VALUES (1, 'rollout 1', 'group 1', '{"question":"Wie viel ist 2 + 2? é"}', 'train', 2, 300.0, 'succeeded', 1, 1795196483039700564, 'training', NULL);
INSERT INTO rollouts (seq, rollout_id, group_id, task, mode, max_attempts, timeout_s, status, tries, queued_ns, origin, replay) VALUES (2, 'rollout 2', 'group 1', '{}', 'train', 2, NULL, 'queued', 0, 1795196483039700564, 'training', NULL);
INSERT INTO schema_version (version, applied_ns) VALUES (6, 1795360472841751420);
INSERT INTO spans (seq, trace_id, span_id, parent_id, operation, name, agent, rollout_id, attempt_id, start_ns, end_ns, status, status_message, attributes, origin) VALUES (1, '0af7651916cd43dd8448eb211c80319c', 'b7ad6b7169203331', NULL, 'chat', 'chat m', 'writer', 'rollout 1', 'rollout 1.1', 1790000000000000001, 1790000000000000002, 'ok', '', '{"gen_ai.response.id":"chatcmpl-1","n":2}', 'training');
SELECT setval(pg_get_serial_sequence('attempts', 'fence'), (SELECT coalesce(max(fence), 1) FROM attempts));
SELECT setval(pg_get_serial_sequence('spans', 'seq'), (SELECT coalesce(max(seq), 1) FROM spans));
SELECT setval(pg_get_serial_sequence('calls', 'seq'), (SELECT coalesce(max(seq), 1) FROM calls));
SELECT setval(pg_get_serial_sequence('rewards', 'seq'), (SELECT coalesce(max(seq), 1) FROM rewards));
SELECT setval(pg_get_serial_sequence('rollouts', 'seq'), (SELECT coalesce(max(seq), 1) FROM rollouts));
SELECT setval(pg_get_serial_sequence('deployments', 'seq'), (SELECT coalesce(max(seq), 1) FROM deployments));
SELECT setval(pg_get_serial_sequence('assignments', 'seq'), (SELECT coalesce(max(seq), 1) FROM assignments));
