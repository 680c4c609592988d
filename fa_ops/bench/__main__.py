from fa_ops.bench.cli import app

app(prog_name="python -m fa_ops bench")
