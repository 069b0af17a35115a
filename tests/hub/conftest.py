"""A hub, and the processes of those who push and pull. They live as long as pytest's own process."""

import pytest
from hub_process import TOKEN, HubProcess
from local_hub import LocalHub


@pytest.fixture(scope="session")
def hub():
    with LocalHub(TOKEN) as hub:
        yield hub


@pytest.fixture(scope="session")
def start(hub, tmp_path_factory):
    """Start a process; tests that kill theirs have one of their own."""
    processes = []

    def start(name, **settings):
        folder = tmp_path_factory.mktemp("processes") / name
        processes.append(HubProcess(hub.url, folder, **settings))
        return processes[-1]

    yield start
    for process in processes:
        process.close()


@pytest.fixture(scope="session")
def everyone(start):
    """Started together: each takes seconds to import what it needs."""
    return {
        "owner": start("owner", token=TOKEN),
        "reader": start("reader"),
        "stranger": start("stranger", has_package=False),
    }


@pytest.fixture
def owner(everyone):
    """Has the token, and pushes."""
    return everyone["owner"]


@pytest.fixture
def reader(everyone):
    """Has the package and no token, and pulls."""
    return everyone["reader"]


@pytest.fixture
def stranger(everyone):
    """Has neither package nor token."""
    return everyone["stranger"]


@pytest.fixture(scope="session")
def trained(everyone, tmp_path_factory):
    """The repository of a run that pushed by a strategy, and what came out; each run is made once."""
    runs = {}

    def train(strategy):
        if strategy not in runs:
            folder = str(tmp_path_factory.mktemp(strategy))
            repository = f"user/run-{strategy}"
            arguments = {"repository": repository, "folder": folder, "strategy": strategy}
            run = everyone["owner"].call("train", **arguments)
            runs[strategy] = repository, run
        return runs[strategy]

    return train
