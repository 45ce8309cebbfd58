"""Where MITuna is wrong, and what its own tests expect where it is right: which test of ours
asserts each.

The lists are those of the study of MITuna (its section "Expected values worth re-stating as
tests"). A line names one test, the one to read first; a test that is renamed or goes must be put
right here.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

#: What MITuna does wrong, said the right way round, and the test that asserts it.
TRAPS = (
    (
        "a time of 0 is never exported",
        "tests/exports/test_export.py::test_what_is_no_time_is_never_exported",
    ),
    (
        "nor one that was imported",
        "tests/exports/test_export_traps.py::test_an_imported_time_of_zero_is_never_exported",
    ),
    (
        "a time of 0 is a failed measurement",
        "tests/coordinator/drain/test_drain.py::test_an_impossible_time_is_a_failed_trial_and_never_a_result",
    ),
    (
        "a job without a result is not compiled",
        "tests/coordinator/test_pipeline_traps.py::test_a_job_without_a_result_is_never_compiled",
    ),
    (
        "it ends as errored",
        "tests/coordinator/test_pipeline_traps.py::test_a_job_that_never_gets_a_result_ends_as_errored",
    ),
    (
        "a quote in a reason is stored as it is",
        "tests/coordinator/test_pipeline_traps.py::test_a_reason_with_quotes_is_stored_as_it_is",
    ),
    (
        "a quote in an option is only text",
        "tests/cli/test_commands.py::test_a_quote_in_every_text_option_is_only_text",
    ),
    (
        "two layers that collide in MITuna are both imported",
        "tests/cli/test_cli_traps.py::test_two_layers_that_collide_in_mituna_are_both_imported_and_tagged",
    ),
    (
        "-F 0 is expanded and counted",
        "tests/cli/test_cli_traps.py::test_a_line_for_all_directions_is_imported_as_three_layers_and_counted",
    ),
    (
        "-F is a bit mask",
        "tests/configs/test_driver_grammar.py::test_the_direction_flag_is_a_bit_mask",
    ),
    (
        "-s 1 of batch norm is honoured",
        "tests/configs/test_batch_norm.py::test_the_short_s_means_save_and_not_search",
    ),
    (
        "and stored",
        "tests/cli/test_cli_traps.py::test_the_save_flag_of_batch_norm_reaches_the_database",
    ),
    (
        "defaults of three dimensions are 1 and not 0",
        "tests/configs/test_driver_grammar.py::test_a_bare_three_dimensional_command_has_miopens_defaults",
    ),
    (
        "and stored",
        "tests/cli/test_cli_traps.py::test_defaults_reach_the_database_as_miopendriver_has_them",
    ),
    (
        "-n left out is 100",
        "tests/configs/test_driver_grammar.py::test_a_bare_command_has_miopens_defaults_in_all_three_directions",
    ),
    (
        "a perf db of one row is exported",
        "tests/exports/test_export_traps.py::test_a_perf_db_of_any_number_of_rows_is_written_and_counted",
    ),
    (
        "exports are deterministic",
        "tests/exports/test_export.py::test_two_exports_are_the_same_and_an_older_one_is_replaced",
    ),
    (
        "and never appended to",
        "tests/exports/test_export_traps.py::test_a_result_that_is_gone_is_not_in_the_next_export_to_the_same_file",
    ),
    (
        "import(export(x)) = x",
        "tests/exports/test_export_traps.py::test_what_was_exported_and_imported_is_exported_the_same",
    ),
    (
        "in the database too",
        "tests/exports/test_export_traps.py::test_results_that_were_exported_and_imported_are_those_that_were_measured",
    ),
    (
        "also for what MIOpen ships",
        "tests/exports/test_export_traps.py::test_a_find_db_that_miopen_ships_is_exported_as_it_was_imported",
    ),
    (
        "golden keeps params of 135 characters",
        "tests/golden/test_golden_build.py::test_params_are_never_cut",
    ),
    (
        "and so do exports",
        "tests/exports/test_export_traps.py::test_params_of_135_characters_are_exported_whole",
    ),
    (
        "base and session take the session's numbers",
        "tests/golden/test_golden_build.py::test_base_and_session_take_the_sessions_numbers_faster_or_slower",
    ),
    (
        "a second fin step in one session is possible",
        "tests/cli/test_miopen_commands.py::test_a_second_fin_step_in_the_same_session_is_possible",
    ),
    (
        "an unknown solver in load_job is an error",
        "tests/cli/test_cli_traps.py::test_an_unknown_solver_is_an_error_and_no_job_of_the_known_ones_is_loaded",
    ),
    (
        "an unknown tag gives a non-zero exit code",
        "tests/cli/test_cli_traps.py::test_an_unknown_tag_ends_every_command_with_a_code_that_says_so",
    ),
)

#: The file of MITuna's tests with the value, and our test of it.
EXPECTED = (
    (
        "test_export_db: the name of the file",
        "tests/exports/test_export_traps.py::test_the_file_name_that_was_asked_for_gets_the_extension",
    ),
    (
        "test_export_db: perf fields of 1-161-700-5x20-...",
        "tests/configs/test_problem_key.py::test_the_perf_fields_of_two_dimensions_are_those_of_mituna",
    ),
    (
        "test_export_db: perf fields of 1024-1-14-14-1x3x3-...-W_g32",
        "tests/exports/test_export_traps.py::test_the_perf_fields_of_a_backward_key_do_not_swap_its_sides",
    ),
    (
        "test_export_db: every field of a key gets its own number",
        "tests/configs/test_problem_key.py::test_every_field_of_a_synthetic_key_gets_its_own_number",
    ),
    (
        "test_export_db: tables, indexes, row",
        "tests/exports/test_export_traps.py::test_a_perf_db_has_the_tables_and_indexes_that_mituna_creates",
    ),
    (
        "test_export_db: two keys with their times",
        "tests/exports/test_export_traps.py::test_times_stand_after_the_first_colon_and_before_the_first_comma",
    ),
    (
        "test_driver: no -F (there an error, here all directions)",
        "tests/configs/test_config_files.py::test_a_line_without_a_direction_is_expanded_and_counted",
    ),
    (
        "test_driver: one layout for all tensors",
        "tests/configs/test_driver_grammar.py::test_one_layout_given_alone_counts_for_all_three_tensors",
    ),
    (
        "test_driver: convfp16 -F 2 --out_layout NHWC",
        "tests/configs/test_config_traps.py::test_the_long_out_layout_alone_counts_for_all_tensors",
    ),
    (
        "test_driver: driver -> row -> driver",
        "tests/cli/test_cli_traps.py::test_a_layer_is_the_same_after_its_row",
    ),
    (
        "test_driver: find-db key -> text -> layer",
        "tests/configs/test_config_traps.py::test_a_key_with_one_word_for_three_equal_layouts_names_its_layer",
    ),
    (
        "test_driver: the batch norm line",
        "tests/configs/test_config_traps.py::test_the_batch_norm_line_of_mitunas_test_has_all_its_values",
    ),
    (
        "test_analyze_parse_db: names of databases",
        "tests/exports/test_export_traps.py::test_the_device_is_read_off_the_name_of_a_database",
    ),
    (
        "test_merge_db_functions: a line of a find db",
        "tests/exports/test_merge_traps.py::test_a_line_is_read_into_its_key_and_solvers",
    ),
    (
        "test_merge_db_functions: names of databases",
        "tests/exports/test_export_traps.py::test_the_device_is_read_off_the_name_of_a_database",
    ),
    (
        "test_merge_db_functions: errors for empty keys and values",
        "tests/exports/test_merge_traps.py::test_a_merge_with_an_empty_key_or_value_is_refused_and_writes_nothing",
    ),
    (
        "test_merge_db_functions: error for an empty master",
        "tests/exports/test_merge_traps.py::test_a_merge_into_an_empty_master_is_refused_and_writes_nothing",
    ),
    (
        "test_merge_db_functions: the user file",
        "tests/exports/test_merge_traps.py::test_the_user_file_of_mitunas_test_is_merged_into_the_old_one",
    ),
    (
        "test_merge_db: all keys of both, replaced or kept",
        "tests/exports/test_merge_traps.py::test_all_keys_of_both_files_are_in_the_merged_one_and_the_target_wins",
    ),
    (
        "test_fin_utils: tensors in NCHW and NHWC",
        "tests/libraries/test_miopen_traps.py::test_the_tensors_of_a_layer_are_named_alike_in_every_layout",
    ),
    (
        "test_fin_utils: a whole fin job",
        "tests/libraries/test_miopen_protocol.py::test_a_whole_request_is_what_mituna_sends",
    ),
    (
        "test_fin_utils, test_utility: target ids",
        "tests/libraries/test_miopen_protocol.py::test_target_ids",
    ),
    (
        "test_fin_class: the applicability request of batch norm",
        "tests/libraries/test_miopen_traps.py::test_a_request_for_applicability_has_an_id_and_a_direction_for_each",
    ),
    (
        "test_celery: queues (there of a session, here of what can serve them)",
        "tests/libraries/test_miopen_traps.py::test_queues_are_of_what_can_serve_them_and_not_of_a_session",
    ),
    (
        "test_celery: prefix of a database's results",
        "tests/queue/test_leases.py::test_two_databases_in_one_redis_do_not_meet",
    ),
    (
        "test_celery: the skeleton of an eval request",
        "tests/libraries/test_miopen_traps.py::test_a_solver_without_kernels_is_put_to_fin_with_an_empty_list_of_them",
    ),
    (
        "test_celery: the canonical driver text",
        "tests/configs/test_driver_grammar.py::test_the_canonical_driver_text_is_the_one_that_mituna_writes",
    ),
    (
        "test_celery: jobs in flight come back",
        "tests/coordinator/drain/test_drain.py::test_work_that_was_returned_or_lost_in_a_queue_costs_nothing",
    ),
    (
        "test_importconfigs: a second import",
        "tests/cli/test_commands.py::test_a_second_import_adds_nothing",
    ),
    (
        "test_importconfigs: tags count distinct layers",
        "tests/cli/test_cli_traps.py::test_the_number_of_tagged_layers_is_that_of_the_distinct_ones",
    ),
    (
        "test_load_job: fin_steps",
        "tests/cli/test_cli_traps.py::test_no_step_means_every_step_and_their_order_is_the_librarys",
    ),
    (
        "test_load_job: no solver",
        "tests/cli/test_cli_traps.py::test_no_solver_means_every_applicable_one",
    ),
    (
        "test_update_golden: a version from a base",
        "tests/golden/test_golden_build.py::test_a_version_from_a_base_alone_holds_the_same_rows",
    ),
    (
        "test_update_golden: duplicates",
        "tests/golden/test_golden_build.py::test_two_results_for_one_layer_and_solver_are_refused",
    ),
    (
        "test_update_golden: another device is no duplicate",
        "tests/golden/test_golden_build.py::test_another_device_replaces_nothing",
    ),
    (
        "test_yaml_parser: steps",
        "packages/tuna-mituna/tests/test_yaml.py::test_steps_become_command_lines_in_their_order",
    ),
)


@cache
def functions_of(path: str) -> frozenset[str]:
    """The names of the test functions of a file, `Class::name` for those in a class."""
    found = set()
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}::{inner.name}"
                for inner in node.body
                if isinstance(inner, ast.FunctionDef)
            }
    return frozenset(name for name in found if name.rpartition("::")[2].startswith("test_"))


@pytest.mark.parametrize("table", [TRAPS, EXPECTED], ids=["traps", "expected"])
def test_every_test_that_is_named_is_there(table: tuple[tuple[str, str], ...]) -> None:
    gone = []
    for _, test in table:
        path, _, name = test.partition("::")
        if not (ROOT / path).is_file() or name not in functions_of(path):
            gone.append(test)
    assert gone == []
