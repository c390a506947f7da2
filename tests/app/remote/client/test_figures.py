from app.remote.client.protocol import ServerFigures, parse_figures

TEXT = """\
# HELP tandem_answers_running Answers that the engine has.
# TYPE tandem_answers_running gauge
tandem_answers_running 2
tandem_answers_waiting 1
tandem_requests_total{route="/v1/models",status="200"} 7
tandem_completion_tokens_per_second 23.5
tandem_kv_cache_tokens 8192
"""


def test_the_figures_of_a_tandem_are_read() -> None:
    assert parse_figures(TEXT) == ServerFigures(23.5, 2, 1, None, 8192)
    used = f"{TEXT}tandem_kv_cache_used_tokens 4096\n"
    assert parse_figures(used).kv_used == 4096


def test_rubbish_has_no_figures() -> None:
    rubbish = "x\n\n# \n1 2 3\ntandem_answers_running NaN\ntandem_answers_waiting -1\n\0 \ud800 5"
    assert parse_figures(rubbish) == ServerFigures()
