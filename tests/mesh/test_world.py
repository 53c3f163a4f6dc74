"""Every launcher's environment becomes the same few numbers; contradictions are told."""

import pytest

from megatron_lite.errors import UserError
from megatron_lite.mesh.launch import init_distributed
from megatron_lite.mesh.world import WorldInfo, detect_world


def test_plain_python_is_one_process_that_meets_nobody() -> None:
    assert detect_world({"PATH": "/bin"}) == WorldInfo(0, 1, 0, 1, "", "python")


def test_torchrun() -> None:
    environ = {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "node0",
        "MASTER_PORT": "1234",
        "TORCHELASTIC_RUN_ID": "x",
    }
    assert detect_world(environ) == WorldInfo(5, 8, 1, 4, "tcp://node0:1234", "torchrun")


def test_one_process_under_torchrun_needs_no_meeting_point() -> None:
    assert detect_world({"RANK": "0", "WORLD_SIZE": "1"}).rendezvous == ""


def test_a_file_rendezvous_wins_over_addresses() -> None:
    environ = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "node0",
        "MLITE_RENDEZVOUS": "file:///x/y",
    }
    assert detect_world(environ).rendezvous == "file:///x/y"


SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_STEP_NODELIST": "gpu[07-09,12],other",
}


def test_slurm_counts_the_tasks_of_its_own_node_and_meets_on_the_first_host() -> None:
    world = detect_world(SLURM)
    assert (world.rank, world.world_size, world.local_rank, world.local_world_size) == (5, 7, 1, 3)
    assert world.rendezvous.startswith("tcp://gpu07:")
    assert 20000 <= int(world.rendezvous.rpartition(":")[2]) < 32000
    assert world.launcher == "Slurm"


def test_two_slurm_steps_do_not_meet() -> None:
    other = detect_world({**SLURM, "SLURM_STEP_ID": "1"})
    assert other.rendezvous != detect_world(SLURM).rendezvous


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("a,b", "a"), ("n3", "n3"), ("r[1-2]n[04-07]", "r1n04"), ("n[1,3-5]-ib,x", "n1-ib")],
)
def test_slurm_host_lists(hosts: str, first: str) -> None:
    world = detect_world({**SLURM, "SLURM_STEP_NODELIST": hosts, "MASTER_PORT": "9"})
    assert world.rendezvous == f"tcp://{first}:9"


def test_the_shell_of_a_batch_script_is_one_process() -> None:
    shell = {
        "ENVIRONMENT": "BATCH",
        "SLURM_JOB_ID": "77",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NTASKS": "8",
    }
    assert detect_world(shell) == WorldInfo()


def test_torchrun_inside_a_slurm_allocation_wins() -> None:
    inner = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "h"}
    assert detect_world({**SLURM, **inner}).world_size == 2


def test_open_mpi_on_one_node() -> None:
    environ = {
        "OMPI_COMM_WORLD_RANK": "2",
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": "2",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
        "PMIX_NAMESPACE": "prterun-1",
    }
    world = detect_world(environ)
    assert (world.rank, world.world_size, world.local_rank, world.local_world_size) == (2, 4, 2, 4)
    assert world.rendezvous.startswith("tcp://127.0.0.1:")


def test_open_mpi_on_several_nodes_meets_where_master_addr_says() -> None:
    environ = {
        "OMPI_COMM_WORLD_RANK": "2",
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    }
    assert detect_world({**environ, "MASTER_ADDR": "h"}).rendezvous == "tcp://h:29500"
    with pytest.raises(UserError, match=r"no place to meet.*MASTER_ADDR"):
        init_distributed(detect_world(environ), "cpu")


def test_a_world_that_nobody_started_can_be_checked_but_not_run() -> None:
    world = detect_world({"WORLD_SIZE": "8"})
    assert (world.rank, world.world_size, world.rendezvous) == (0, 8, "")
    with pytest.raises(UserError, match=r"8 ranks, but no place to meet.*unset WORLD_SIZE"):
        init_distributed(world, "cpu")


def test_mpich() -> None:
    environ = {
        "PMI_RANK": "3",
        "PMI_SIZE": "4",
        "MPI_LOCALRANKID": "1",
        "MPI_LOCALNRANKS": "2",
        "MASTER_ADDR": "h",
    }
    world = detect_world(environ)
    assert (world.rank, world.world_size, world.local_rank, world.local_world_size) == (3, 4, 1, 2)


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"RANK": "3"}, "WORLD_SIZE is not"),
        ({"RANK": "two", "WORLD_SIZE": "4"}, "RANK='two'"),
        ({"RANK": "4", "WORLD_SIZE": "4", "MASTER_ADDR": "h"}, "rank 4 is outside 0..3"),
        ({"WORLD_SIZE": "0"}, "rank 0 is given for 0 ranks"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK"),
    ],
)
def test_a_broken_environment_is_told(environ: dict[str, str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        detect_world(environ)
