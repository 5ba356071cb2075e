import torch


def pytest_configure(config):
    # `report` prints the table; that of pytest-benchmark knows one call of each case.
    config.option.benchmark_quiet = True


def pytest_benchmark_update_machine_info(config, machine_info):
    """What the report's first line says beside the processor."""
    machine_info["torch"] = torch.__version__
    machine_info["threads"] = torch.get_num_threads()
    # What the processor shows: a virtual machine may hide some.
    machine_info["vectors"] = torch.backends.cpu.get_cpu_capability()
    if torch.cuda.is_available():
        machine_info["gpu"] = torch.cuda.get_device_name()


def pytest_benchmark_update_json(config, benchmarks, output_json):
    """A call's time is on a GPU that of its launch: there extra_info alone has times."""
    for record in output_json["benchmarks"]:
        if "cuda" in record["name"]:
            del record["stats"]
