# SPDX-License-Identifier: Apache-2.0
# Tests whose devices are GPUs: simulated ones, or with the cuda preset those of this machine. The simulator is preloaded, so
# not beside a sanitizer, which has to come first.
if(LOCKSTEP_SANITIZE)
  return()
endif()

# Tests of strategies that run on cores, once more: 20 steps in float64 on 1 to 4 GPUs, compared with one core.
set(gpu_tests "Sizes/DevicesOfSize.reduce*" "Devices.refuse*" "Devices.that_call_different*" "DevicePlace.*" "Sizes/TowersOfSize.*"
  "Towers.train*" "Sizes/DataParallelOfSize.*" "DataParallel.trains*" "Sizes/DataParallelOn.*" "AverageNets.*"
  "Sizes/AveragingOfSize.*" "Averaging.*" "Kinds/LocalKindOfSize.*" "Sizes/DistSyncOfSize.*" "DistSync.trains*"
  "DistAsync.with_one*" "Sizes/PipelineOfSize.*" "Pipeline.trains*" "Pipeline.passes*" "Pipeline.cuts*" "Pipeline.draws*")
list(JOIN gpu_tests ":" gpu_filter)
# `local` chooses by times, so two runs may choose differently.
set(not_on_gpus "Kinds/LocalKindOfSize.goes_on*/1:Kinds/LocalKindOfSize.goes_on*/2:Kinds/LocalKindOfSize.goes_on*/3")

if(LOCKSTEP_CUDA)
  include(real_gpus.cmake)
  return()
endif()

# A rank of ddp has a GPU for itself: 2, 3 and 4 ranks.
set(on_simulated_gpus "${gpu_filter}:Sizes/DdpOfSize.train*-${not_on_gpus}:Sizes/DdpOfSize.*/3")
lockstep_check(strategy.simulated_gpus 600 strategy_test --gtest_filter=${on_simulated_gpus})

# Asynchronous workers, which have a reference of their own.
lockstep_check(step_fuzz.simulated_gpus 600 step_fuzz --gtest_filter=Workers/WorkersInTurn.*)
set_tests_properties(strategy.simulated_gpus step_fuzz.simulated_gpus PROPERTIES ENVIRONMENT
  "LD_PRELOAD=$<TARGET_FILE:lockstep_simulated_cuda>;LOCKSTEP_SIMULATED_GPUS=4;LOCKSTEP_TEST_DEVICES=cuda")

# The check for what one thread writes and another one uses is off by default.
lockstep_check(strategy.threads_on_simulated_gpus 300 simulated_cuda_test --gtest_filter=Strategies/GpuStrategies.train_on*)
set_tests_properties(strategy.threads_on_simulated_gpus PROPERTIES ENVIRONMENT "LOCKSTEP_SIMULATED_GPUS=4;LOCKSTEP_SIMULATED_HOST=threads")

# The filters above find what they name.
lockstep_check(strategy.filters_for_gpus_name_tests 120 ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/filter_test.py
  $<TARGET_FILE:strategy_test> "${on_simulated_gpus}" $<TARGET_FILE:step_fuzz> "Workers/WorkersInTurn.*"
  $<TARGET_FILE:simulated_cuda_test> "Strategies/GpuStrategies.train_on*")

lockstep_test(gpu_command_test command.simulated_gpus SHARDS 4 TIMEOUT 600 CHECK "*"
  SOURCES train/gpu_command_test.cc launch/child.cc)
target_link_libraries(gpu_command_test PRIVATE lockstep_core nlohmann_json::nlohmann_json)
target_compile_definitions(gpu_command_test PRIVATE SIMULATED_CUDA="$<TARGET_FILE:lockstep_simulated_cuda>")
add_dependencies(gpu_command_test lockstep_command lockstep_train lockstep_gpus lockstep_simulated_cuda)
