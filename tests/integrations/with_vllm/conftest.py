"""A vLLM server for the tests of a file."""

import pytest


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    from vllm_serving import save

    return save("Llama", tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def server(folder):
    from vllm_serving import Served

    server = Served(folder)
    try:
        yield server.wait_until_up()
    finally:
        server.close()
