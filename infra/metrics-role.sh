#!/bin/sh
# Makes the database role of the metrics, which reads who builds what (the leases) and nothing else.
#
#   METRICS_PASSWORD=… POSTGRES_USER=stemma POSTGRES_DB=stemma PGHOST=… PGPASSWORD=… infra/metrics-role.sh
#
# POSTGRES_USER is the role of the other parts, and may create roles. Said again, it changes the password. The compose
# file has it run when the database is made; for an older database, say it once.
set -eu
: "${METRICS_PASSWORD:?the password that the metrics get}"
export METRICS_PASSWORD
exec psql --no-psqlrc --quiet --set ON_ERROR_STOP=1 --username "$POSTGRES_USER" --dbname "$POSTGRES_DB" <<'SQL'
\getenv password METRICS_PASSWORD
SELECT 'CREATE ROLE stemma_metrics' WHERE NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'stemma_metrics') \gexec
ALTER ROLE stemma_metrics LOGIN PASSWORD :'password';
ALTER ROLE stemma_metrics SET default_transaction_read_only = on;
CREATE SCHEMA IF NOT EXISTS leases;
GRANT USAGE ON SCHEMA leases TO stemma_metrics;
GRANT SELECT ON ALL TABLES IN SCHEMA leases TO stemma_metrics;
ALTER DEFAULT PRIVILEGES IN SCHEMA leases GRANT SELECT ON TABLES TO stemma_metrics;
SQL
