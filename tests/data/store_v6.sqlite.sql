BEGIN TRANSACTION;
CREATE TABLE assignments (
	seq INTEGER NOT NULL, 
	agent TEXT NOT NULL, 
	attempt_id TEXT NOT NULL, 
	policy TEXT NOT NULL, 
	number INTEGER NOT NULL, 
	at_ns BIGINT NOT NULL, 
	PRIMARY KEY (seq), 
	UNIQUE (attempt_id, agent)
);
INSERT INTO "assignments" VALUES(1,'writer','rollout 1.1','policy',1,1795360472841751420);
CREATE TABLE attempts (
	fence INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	attempt_id TEXT NOT NULL, 
	rollout_id TEXT NOT NULL, 
	number INTEGER NOT NULL, 
	worker TEXT NOT NULL, 
	status TEXT NOT NULL, 
	lease_until_ns BIGINT NOT NULL, 
	started_ns BIGINT NOT NULL, 
	ended_ns BIGINT, 
	error TEXT, 
	UNIQUE (attempt_id)
);
INSERT INTO "attempts" VALUES(1,'rollout 1.1','rollout 1',1,'worker','succeeded',1795196543046894108,1795196483049311806,1795196483080152288,NULL);
CREATE TABLE calls (
	seq INTEGER NOT NULL, 
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
	prompt_token_ids BLOB, 
	request TEXT NOT NULL, 
	sampling TEXT NOT NULL, 
	origin TEXT DEFAULT 'training' NOT NULL, 
	PRIMARY KEY (seq), 
	UNIQUE (call_id)
);
INSERT INTO "calls" VALUES(1,'call 1','chatcmpl-1','0af7651916cd43dd8448eb211c80319c','b7ad6b7169203331','rollout 1','rollout 1.1','writer','policy',3,1790000000000000001,1790000000000000002,NULL,X'0100000002000000','{"model":"policy"}','{"temperature":1.0}','training');
CREATE TABLE choices (
	call_id TEXT NOT NULL, 
	position INTEGER NOT NULL, 
	choice_index INTEGER NOT NULL, 
	token_ids BLOB, 
	logprobs BLOB, 
	finish_reason TEXT, 
	message TEXT NOT NULL, 
	PRIMARY KEY (call_id, position)
);
INSERT INTO "choices" VALUES('call 1',0,0,X'0300000004000000',X'9A9999999999B9BF000000000000D0BF','stop','{"role":"assistant","content":"4"}');
INSERT INTO "choices" VALUES('call 1',1,1,X'050000000600000007000000',X'000000000000E0BF000000000000E0BF000000000000E0BF','length','{}');
CREATE TABLE consumed_groups (
	group_id TEXT NOT NULL, 
	consumer TEXT NOT NULL, 
	consumed_ns BIGINT NOT NULL, 
	PRIMARY KEY (group_id)
);
INSERT INTO "consumed_groups" VALUES('group 1','run 1, step 1',1795196483085507770);
CREATE TABLE deployments (
	seq INTEGER NOT NULL, 
	agent TEXT NOT NULL, 
	number INTEGER NOT NULL, 
	stage TEXT NOT NULL, 
	stable TEXT NOT NULL, 
	candidate TEXT, 
	previous TEXT, 
	share DOUBLE NOT NULL, 
	checkpoint TEXT, 
	base TEXT, 
	reason TEXT NOT NULL, 
	actor TEXT NOT NULL, 
	at_ns BIGINT NOT NULL, 
	details TEXT NOT NULL, 
	PRIMARY KEY (seq), 
	UNIQUE (agent, number)
);
INSERT INTO "deployments" VALUES(1,'writer',1,'stable','policy',NULL,NULL,0.0,NULL,NULL,'the first one','operator',1795360472841751420,'{}');
CREATE TABLE lease_clock (
	id INTEGER NOT NULL, 
	now_ns BIGINT NOT NULL, 
	wrote_ns BIGINT DEFAULT 0 NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "lease_clock" VALUES(1,1795196483046894108,0);
CREATE TABLE rewards (
	seq INTEGER NOT NULL, 
	reward_id TEXT NOT NULL, 
	rollout_id TEXT NOT NULL, 
	attempt_id TEXT NOT NULL, 
	value DOUBLE NOT NULL, 
	agent TEXT, 
	span_id TEXT, 
	source TEXT NOT NULL, 
	given_ns BIGINT, 
	choice INTEGER, 
	PRIMARY KEY (seq), 
	UNIQUE (reward_id)
);
INSERT INTO "rewards" VALUES(1,'reward 1','rollout 1','rollout 1.1',0.1,NULL,NULL,'run',NULL,NULL);
CREATE TABLE rollouts (
	seq INTEGER NOT NULL, 
	rollout_id TEXT NOT NULL, 
	group_id TEXT NOT NULL, 
	task TEXT NOT NULL, 
	mode TEXT NOT NULL, 
	max_attempts INTEGER NOT NULL, 
	timeout_s DOUBLE, 
	status TEXT NOT NULL, 
	tries INTEGER NOT NULL, 
	queued_ns BIGINT NOT NULL, 
	origin TEXT DEFAULT 'training' NOT NULL, 
	replay TEXT, 
	PRIMARY KEY (seq), 
	UNIQUE (rollout_id)
);
INSERT INTO "rollouts" VALUES(1,'rollout 1','group 1','{"question":"Wie viel ist 2 + 2? é"}','train',2,300.0,'succeeded',1,1795196483039700564,'training',NULL);
INSERT INTO "rollouts" VALUES(2,'rollout 2','group 1','{}','train',2,NULL,'queued',0,1795196483039700564,'training',NULL);
CREATE TABLE schema_version (
	version INTEGER NOT NULL, 
	applied_ns BIGINT NOT NULL, 
	PRIMARY KEY (version)
);
INSERT INTO "schema_version" VALUES(6,1795360472841751420);
CREATE TABLE spans (
	seq INTEGER NOT NULL, 
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
INSERT INTO "spans" VALUES(1,'0af7651916cd43dd8448eb211c80319c','b7ad6b7169203331',NULL,'chat','chat m','writer','rollout 1','rollout 1.1',1790000000000000001,1790000000000000002,'ok','','{"gen_ai.response.id":"chatcmpl-1","n":2}','training');
CREATE UNIQUE INDEX spans_by_id ON spans (trace_id, span_id, coalesce(attempt_id, ''));
CREATE INDEX spans_by_origin ON spans (origin, start_ns) WHERE origin <> 'training';
CREATE INDEX spans_by_rollout_id ON spans (rollout_id) WHERE rollout_id IS NOT NULL;
CREATE INDEX spans_by_attempt_id ON spans (attempt_id) WHERE attempt_id IS NOT NULL;
CREATE INDEX calls_by_rollout_id ON calls (rollout_id) WHERE rollout_id IS NOT NULL;
CREATE INDEX ix_calls_trace_id ON calls (trace_id);
CREATE INDEX calls_by_origin ON calls (origin, start_ns) WHERE origin <> 'training';
CREATE INDEX calls_by_attempt_id ON calls (attempt_id) WHERE attempt_id IS NOT NULL;
CREATE INDEX rewards_by_attempt_id ON rewards (attempt_id) WHERE attempt_id IS NOT NULL;
CREATE INDEX rewards_by_rollout_id ON rewards (rollout_id) WHERE rollout_id IS NOT NULL;
CREATE INDEX ix_rollouts_group_id ON rollouts (group_id);
CREATE INDEX rollouts_queued ON rollouts (seq) WHERE status = 'queued';
CREATE INDEX ix_attempts_rollout_id ON attempts (rollout_id);
CREATE INDEX attempts_running ON attempts (lease_until_ns) WHERE status = 'running';
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('attempts',1);
COMMIT;
