-- A workspace of the first release, written by its own code: what sqlite3 .dump says of it.
PRAGMA user_version = 1;
BEGIN TRANSACTION;
CREATE TABLE history (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    variant TEXT NOT NULL REFERENCES variants (id),
    at REAL NOT NULL,
    from_state TEXT,
    to_state TEXT NOT NULL,
    reason TEXT,
    equivalence TEXT,
    run TEXT
) STRICT;
INSERT INTO "history" VALUES(1,'var-0001',1.79607556750100183485e+09,NULL,'pending',NULL,NULL,NULL);
INSERT INTO "history" VALUES(2,'var-0002',1.79607556750879216195e+09,NULL,'pending',NULL,NULL,NULL);
INSERT INTO "history" VALUES(3,'var-0002',1.79607556751063919065e+09,'pending','removed','no gain: it''s bound by dit',NULL,NULL);
CREATE TABLE jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    tool TEXT NOT NULL,
    function TEXT NOT NULL,
    arguments TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('queued', 'running', 'done', 'failed', 'cancelled', 'lost')),
    progress REAL NOT NULL DEFAULT 0,
    message TEXT NOT NULL DEFAULT '',
    error TEXT,
    error_detail TEXT,
    starter TEXT NOT NULL,
    process TEXT,
    created_at REAL NOT NULL,
    started_at REAL,
    finished_at REAL
) STRICT;
INSERT INTO "jobs" VALUES(1,'job-00000001','bench_run','flashrt.mcp_server.work:bench_run','{}','failed',0.5,'measuring',NULL,NULL,'{"pid": 4194000, "start_ticks": 5330343, "boot": "00000000-0000-4000-8000-000000000000", "namespace": "pid:[4026531836]"}',NULL,1.0,2.0,3.0);
CREATE TABLE records (
    kind TEXT NOT NULL, id TEXT NOT NULL, payload TEXT NOT NULL, path TEXT, created_at REAL NOT NULL,
    PRIMARY KEY (kind, id)
) STRICT;
INSERT INTO "records" VALUES('program','prog-0123456789ab','{"name": "toy", "folder": "."}','program.yaml',1.79607556746939134601e+09);
INSERT INTO "records" VALUES('run','run-00000001','{"valid": true, "reasons": [], "system": {"reference": "fast.py:serve", "digest": "aaaa"}, "figures": {"fps": 12.5}}',NULL,1.79607556747081494336e+09);
INSERT INTO "records" VALUES('equivalence','eq-00000001','{"equivalent": true, "candidate": {"reference": "fast.py:serve", "digest": "aaaa"}, "baseline": {"reference": "reference.py:serve", "digest": "base"}}',NULL,1.79607556747226333616e+09);
CREATE TABLE reservations (number INTEGER PRIMARY KEY AUTOINCREMENT, owner TEXT NOT NULL) STRICT;
INSERT INTO "reservations" VALUES(3,'{"pid": 4194000, "start_ticks": 5330343, "boot": "00000000-0000-4000-8000-000000000000", "namespace": "pid:[4026531836]"}');
CREATE TABLE variants (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    hypothesis TEXT NOT NULL,
    transformation TEXT NOT NULL,
    bottleneck TEXT NOT NULL,
    legality TEXT NOT NULL,
    system TEXT,
    parent TEXT REFERENCES variants (id),
    expected TEXT NOT NULL,
    candidate TEXT UNIQUE,
    deployment TEXT,
    state TEXT NOT NULL CHECK (state IN ('pending', 'claimed', 'measured', 'removed')),
    rank REAL NOT NULL,
    folder TEXT,
    isolation TEXT,
    equivalence TEXT,
    run TEXT,
    reason TEXT,
    created_at REAL NOT NULL,
    updated_at REAL NOT NULL,
    claimed_at REAL,
    CHECK (state != 'measured' OR (equivalence IS NOT NULL AND run IS NOT NULL)),
    CHECK (state != 'removed' OR length(trim(reason)) > 0)
) STRICT;
INSERT INTO "variants" VALUES(1,'var-0001','decoding hides behind denoising','stream','edge dit -> vae','the decoder is causal',NULL,NULL,'{}',NULL,NULL,'pending',0.0,'.flashrt/variants/var-0001','{"kind": "copy", "linked": [], "note": ""}',NULL,NULL,NULL,1.79607556750100183485e+09,1.79607556750100183485e+09,NULL);
INSERT INTO "variants" VALUES(2,'var-0002','two devices','disaggregate dit|vae','cycle vae','no shared state',NULL,NULL,'{}',NULL,NULL,'removed',0.0,'.flashrt/variants/var-0002','{"kind": "copy", "linked": [], "note": ""}',NULL,NULL,'no gain: it''s bound by dit',1.79607556750879216195e+09,1.79607556751063919065e+09,NULL);
CREATE INDEX records_by_id ON records (id);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('reservations',3);
INSERT INTO "sqlite_sequence" VALUES('history',3);
INSERT INTO "sqlite_sequence" VALUES('jobs',1);
COMMIT;
