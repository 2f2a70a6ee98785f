"""What an engine shows of itself; compiles nothing."""

from dsv4_jax.engine import Engine


def test_an_engine_shows_its_requests(small, roomy):
    engine = Engine(small[0], roomy, token_budget=20)
    engine.add([1, 2, 3], max_new_tokens=4, id="chat")
    schema = roomy.schema
    sizes = f"slots: 0 of {schema.max_requests}, blocks: 0 of {schema.num_blocks}"
    request = "request 'chat': 0 of 4 tokens generated, waiting"
    assert repr(engine) == f"Engine(running: 0, waiting: 1, steps: 0, {sizes}, {request})"
    page = engine._repr_html_()
    assert "<th>request &#x27;chat&#x27;</th>" in page and "0 of 4 tokens generated, waiting" in page
    assert f"0 of {schema.num_blocks}" in page
