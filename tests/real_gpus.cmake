# SPDX-License-Identifier: Apache-2.0
# The tests of strategies on the GPUs of this machine; where there is one, each device of a test is on it. A machine without a
# GPU only builds them; tests/gpu_kit.sh carries them to one that has.
add_executable(gpu_command_test train/gpu_command_test.cc launch/child.cc)
target_link_libraries(gpu_command_test PRIVATE lockstep_core nlohmann_json::nlohmann_json GTest::gtest_main)
add_dependencies(gpu_command_test lockstep_command lockstep_train lockstep_gpus)

# One that forks: a process can't once it has used CUDA.
string(APPEND not_on_gpus ":DevicePlace.is_no_gpu*")
set(in_turn "Workers/WorkersInTurn.*")

file(GLOB gpus /dev/nvidia[0-9]*)
list(LENGTH gpus gpu_count)

# Devices on one GPU share its generator.
if(gpu_count LESS 3)
  string(APPEND not_on_gpus ":Pipeline.draws_the_same_dropout*")
endif()

# A rank of ddp has a GPU for itself.
set(ranks_on_gpus "")
set(indices 0 1 2 3)
set(sizes 2 3 4 7)
foreach(index ranks IN ZIP_LISTS indices sizes)
  if(ranks LESS_EQUAL gpu_count)
    string(APPEND ranks_on_gpus ":Sizes/DdpOfSize.train*/${index}")
  endif()
endforeach()

# Under compute-sanitizer, which slows a kernel down a hundred times: each strategy on two devices. Not under racecheck, which
# looks at shared memory within a kernel: lockstep has no kernels of its own.
set(two_devices "Sizes/TowersOfSize.*/1:Sizes/PipelineOfSize.*/1:Sizes/DataParallelOfSize.*/1:Sizes/AveragingOfSize.*/1"
  "Kinds/LocalKindOfSize.trains*/5:Kinds/LocalKindOfSize.trains*/9:Kinds/LocalKindOfSize.trains*/13")
list(JOIN two_devices ":" two_devices)

# The command, each strategy on two devices; those with a process for each of them need two GPUs.
set(command_tests "Strategies/GpuStrategy.*")
foreach(name towers data_parallel averaging local local_update_cpu local_allreduce_cpu local_allreduce_device)
  string(APPEND command_tests ":Strategies/StrategyOnGpus.learns/${name}")
endforeach()
foreach(name ddp virtual_shards towers averaging)
  string(APPEND command_tests ":Strategies/CheckpointOnGpus.*/${name}")
endforeach()
if(gpu_count GREATER 1)
  string(APPEND command_tests ":GpuCommand.trains_on_one_gpu:GpuCommand.trains_with_a_process_per_gpu*:GpuCommand.trains_a_pipeline*")
endif()

# For tests/gpu_kit.sh.
file(CONFIGURE OUTPUT ${CMAKE_BINARY_DIR}/gpu_filters.json CONTENT [[{
  "strategy_test": "@gpu_filter@-@not_on_gpus@",
  "step_fuzz": "@in_turn@",
  "gpu_command_test": "@command_tests@",
  "memcheck": "@two_devices@"
}
]] @ONLY)
if(gpu_count EQUAL 0)
  return()
endif()

set(on_gpus ${CMAKE_COMMAND} -E env LOCKSTEP_TEST_DEVICES=cuda)
add_test(NAME strategy.gpus
  COMMAND ${on_gpus} $<TARGET_FILE:strategy_test> --gtest_filter=${gpu_filter}${ranks_on_gpus}-${not_on_gpus})
add_test(NAME step_fuzz.gpus COMMAND ${on_gpus} $<TARGET_FILE:step_fuzz> --gtest_filter=${in_turn})
set_tests_properties(strategy.gpus step_fuzz.gpus PROPERTIES TIMEOUT 1200)
add_test(NAME strategy.filters_for_gpus_name_tests COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/filter_test.py
  $<TARGET_FILE:strategy_test> "${gpu_filter}${ranks_on_gpus}-${not_on_gpus}" $<TARGET_FILE:step_fuzz> ${in_turn})

add_test(NAME command.gpus COMMAND gpu_command_test --gtest_filter=${command_tests})
set_tests_properties(command.gpus PROPERTIES TIMEOUT 1200)

find_program(COMPUTE_SANITIZER compute-sanitizer HINTS /usr/local/cuda/bin)
if(NOT COMPUTE_SANITIZER)
  message(WARNING "lockstep: no compute-sanitizer here, so the tests under it are left out. "
    "next: install the CUDA toolkit's cuda-sanitizer package")
  return()
endif()
add_test(NAME strategy.gpus.memcheck
  COMMAND ${on_gpus} ${COMPUTE_SANITIZER} --error-exitcode 9 $<TARGET_FILE:strategy_test> --gtest_filter=${two_devices})
set_tests_properties(strategy.gpus.memcheck PROPERTIES TIMEOUT 3600)
