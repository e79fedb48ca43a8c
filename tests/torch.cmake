# SPDX-License-Identifier: Apache-2.0
# A binary with torch.
function(lockstep_torch_test target prefix)
  lockstep_test(${target} ${prefix} ${ARGN})
  target_precompile_headers(${target} REUSE_FROM lockstep_pch)
  target_link_libraries(${target} PRIVATE lockstep)
endfunction()

# A binary per room: the tests that stand beside its sources. More: CHECK, as for lockstep_test.
function(lockstep_room_test room shards)
  lockstep_tests_in(sources ${room})
  list(FILTER sources EXCLUDE REGEX "/collective/shm/|_fuzz_test")
  lockstep_torch_test(${room}_test ${room} SHARDS ${shards} TIMEOUT 900 ${ARGN} SOURCES ${sources})
endfunction()

lockstep_room_test(collective 8 CHECK "GlooNetwork.carries_more_than_two_gibibytes:LargeTensors.*")
target_compile_options(collective_test PRIVATE -Wno-deprecated-declarations)  # torch 2.15 has new names for what 2.11 calls otherwise
lockstep_room_test(data 4)
lockstep_room_test(model 2)
lockstep_room_test(step 6)
lockstep_room_test(strategy 8)
lockstep_room_test(checkpoint 1 CHECK "CheckpointWriter.saves_a_tensor_of_more_than_2_gib")
file(GLOB plan_tests CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tools/plan/*_test.cc)
lockstep_torch_test(plan_test plan SHARDS 1 TIMEOUT 900 SOURCES ${plan_tests})
lockstep_room_test(train 2)
target_link_libraries(data_test PRIVATE ZLIB::ZLIB PNG::PNG JPEG::JPEG)
target_link_libraries(train_test PRIVATE nlohmann_json::nlohmann_json ${XXHASH_LIBRARY})

# Mutated files, in a binary of its own: `make soak-5` gives it longer.
lockstep_torch_test(data_fuzz_test data.fuzz SHARDS 2 TIMEOUT 14400
  SOURCES ${PROJECT_SOURCE_DIR}/lockstep/data/formats/readers_fuzz_test.cc)
target_link_libraries(data_fuzz_test PRIVATE PNG::PNG JPEG::JPEG)

# Copies of the sources that have deliberate defects: tests/defects.py.
set(defective strategy/ddp/ddp.cc step/guards/guards.cc model/sync_batch_norm.cc step/update/flat_update.cc
  step/update/journal_writer.h)
foreach(source communication_hook local_gradients buckets published step_agreement)
  list(APPEND defective step/${source}.cc)
endforeach()
set(defects ${CMAKE_CURRENT_BINARY_DIR}/defects)
list(TRANSFORM defective PREPEND ${PROJECT_SOURCE_DIR}/lockstep/ OUTPUT_VARIABLE originals)
list(TRANSFORM defective PREPEND ${defects}/lockstep/ OUTPUT_VARIABLE sources_with_defects)
add_custom_command(OUTPUT ${sources_with_defects} DEPENDS defects.py ${originals}
  COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/defects.py ${defects} ${defective})
set_source_files_properties(${sources_with_defects} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
function(lockstep_has_defects target)
  target_include_directories(${target} BEFORE PRIVATE ${defects})
  target_compile_definitions(${target} PRIVATE LOCKSTEP_DEFECTS)
  set_target_properties(${target} PROPERTIES ENABLE_EXPORTS ON)
  target_link_libraries(${target} PRIVATE ${XXHASH_LIBRARY})
endfunction()

# Random programs over the API of a step; and the same beside deliberate defects.
set(step_fuzz_sources generator meetings processes program rank reference reference_hook reference_optimizer rules run)
list(TRANSFORM step_fuzz_sources REPLACE "(.+)" "step_fuzz/\\1.cc")
lockstep_torch_test(step_fuzz step_fuzz SHARDS 2 TIMEOUT 14400 SOURCES ${step_fuzz_sources} step_fuzz/strategy_program.cc
  step_fuzz/step_fuzz_test.cc step_fuzz/strategy_fuzz_test.cc)
lockstep_torch_test(step_fuzz_defects step_fuzz.defects SHARDS 2 TIMEOUT 1200 CHECK "*"
  SOURCES ${step_fuzz_sources} step_fuzz/step_fuzz_defects_test.cc ${sources_with_defects})
lockstep_has_defects(step_fuzz_defects)

# The program that tests/hops.py walks through.
add_executable(hops EXCLUDE_FROM_ALL hops.cc)
target_precompile_headers(hops REUSE_FROM lockstep_pch)
target_link_libraries(hops PRIVATE lockstep)

# Processes that are killed inside an update, and finished by others; once more beside deliberate defects.
set(killed_update_sources killed_update/workload.cc killed_update/killed_update_test.cc)
lockstep_torch_test(killed_update step.killed SHARDS 2 TIMEOUT 1200 SOURCES ${killed_update_sources})
list(FILTER sources_with_defects INCLUDE REGEX "/update/")
lockstep_torch_test(killed_update_defects step.killed_defects SHARDS 1 TIMEOUT 600 CHECK "*"
  SOURCES ${killed_update_sources} ${sources_with_defects})
lockstep_has_defects(killed_update_defects)

# Several processes: programs that are started as a user starts them.
foreach(source train/misbehaving_task train/slow_lenet train/lossless_ranks train/unusual_loop train/surviving_loop
    recovery/fragile_task)
  get_filename_component(program ${source} NAME)
  add_executable(${program} ${source}.cc)
  target_precompile_headers(${program} REUSE_FROM lockstep_pch)
  target_compile_options(${program} PRIVATE -O1)
  target_link_libraries(${program} PRIVATE lockstep)
endforeach()
target_link_libraries(lossless_ranks PRIVATE GTest::gtest)

lockstep_test(command_test command SHARDS 4 TIMEOUT 600 CHECK "PlanCommand.*:*KVStore*:*AsyncLeNet*:StartedRanks.*mpi*"
  SOURCES train/command_test.cc train/data_command_test.cc train/use_command_test.cc train/kvstore_command_test.cc train/plan_command_test.cc security/one_machine_test.cc launch/child.cc)
target_link_libraries(command_test PRIVATE lockstep_core nlohmann_json::nlohmann_json)
target_compile_definitions(command_test PRIVATE
  LOCKSTEP_COMMAND="$<TARGET_FILE:lockstep_command>" MISBEHAVING_TASK="$<TARGET_FILE:misbehaving_task>"
  SLOW_LENET="$<TARGET_FILE:slow_lenet>")
add_dependencies(command_test lockstep_train lockstep_data lockstep_plan misbehaving_task slow_lenet)

lockstep_test(compare_test command.compare SHARDS 4 TIMEOUT 600 CHECK "*" SOURCES train/compare_command_test.cc launch/child.cc)
target_link_libraries(compare_test PRIVATE lockstep_core nlohmann_json::nlohmann_json)
target_compile_definitions(compare_test PRIVATE LOCKSTEP_COMMAND="$<TARGET_FILE:lockstep_command>")
add_dependencies(compare_test lockstep_command lockstep_train)

lockstep_test(lost_ranks_test command.lost_ranks SHARDS 4 TIMEOUT 600 CHECK "*slow_is_waited_for*"
  SOURCES train/lost_ranks_test.cc train/ranks.cc launch/child.cc)
target_link_libraries(lost_ranks_test PRIVATE lockstep_core nlohmann_json::nlohmann_json)
target_compile_definitions(lost_ranks_test PRIVATE MISBEHAVING_TASK="$<TARGET_FILE:misbehaving_task>")
add_dependencies(lost_ranks_test misbehaving_task)

lockstep_test(hang_test command.hang SHARDS 3 TIMEOUT 600 SOURCES train/hang_test.cc launch/child.cc)
target_link_libraries(hang_test PRIVATE lockstep_core nlohmann_json::nlohmann_json)
target_compile_definitions(hang_test PRIVATE MISBEHAVING_TASK="$<TARGET_FILE:misbehaving_task>")
add_dependencies(hang_test misbehaving_task)

lockstep_test(stop_test command.stop SHARDS 4 TIMEOUT 600
  SOURCES train/stop_test.cc train/ranks.cc launch/child.cc)
target_link_libraries(stop_test PRIVATE lockstep_core nlohmann_json::nlohmann_json)
target_compile_definitions(stop_test PRIVATE
  LOCKSTEP_COMMAND="$<TARGET_FILE:lockstep_command>" MISBEHAVING_TASK="$<TARGET_FILE:misbehaving_task>"
  UNUSUAL_LOOP="$<TARGET_FILE:unusual_loop>")
add_dependencies(stop_test lockstep_train misbehaving_task unusual_loop)

lockstep_test(unusual_loop_test command.unusual_loop SHARDS 4 TIMEOUT 600
  SOURCES train/unusual_loop_test.cc train/ranks.cc launch/child.cc)
target_link_libraries(unusual_loop_test PRIVATE lockstep_core nlohmann_json::nlohmann_json)
target_compile_definitions(unusual_loop_test PRIVATE
  LOCKSTEP_COMMAND="$<TARGET_FILE:lockstep_command>" UNUSUAL_LOOP="$<TARGET_FILE:unusual_loop>")
add_dependencies(unusual_loop_test unusual_loop lockstep_command)

lockstep_test(surviving_loop_test command.surviving_loop SHARDS 2 TIMEOUT 600
  SOURCES train/surviving_loop_test.cc launch/child.cc)
target_link_libraries(surviving_loop_test PRIVATE lockstep_core nlohmann_json::nlohmann_json)
target_compile_definitions(surviving_loop_test PRIVATE
  LOCKSTEP_COMMAND="$<TARGET_FILE:lockstep_command>" SURVIVING_LOOP="$<TARGET_FILE:surviving_loop>")
add_dependencies(surviving_loop_test surviving_loop lockstep_command)

lockstep_torch_test(lossless_test command.lossless SHARDS 4 TIMEOUT 600
  SOURCES train/lossless_command_test.cc launch/child.cc)
target_compile_definitions(lossless_test PRIVATE
  LOCKSTEP_COMMAND="$<TARGET_FILE:lockstep_command>" LOSSLESS_RANKS="$<TARGET_FILE:lossless_ranks>")
add_dependencies(lossless_test lossless_ranks lockstep_command lockstep_train)

# Ranks that are lost at chosen points of a run, and replaced.
lockstep_torch_test(recovery_test recovery SHARDS 4 TIMEOUT 7200
  SOURCES recovery/kills_test.cc recovery/bad_cases_test.cc recovery/jobs.cc launch/child.cc)
target_link_libraries(recovery_test PRIVATE nlohmann_json::nlohmann_json)
target_compile_definitions(recovery_test PRIVATE
  LOCKSTEP_COMMAND="$<TARGET_FILE:lockstep_command>" FRAGILE_TASK="$<TARGET_FILE:fragile_task>"
  OTHER_PROGRAM="$<TARGET_FILE:misbehaving_task>")
add_dependencies(recovery_test fragile_task misbehaving_task lockstep_command lockstep_train)

lockstep_torch_test(reference_test reference SHARDS 2 TIMEOUT 300
  SOURCES reference/ddp_reference_test.cc reference/optimizer_reference_test.cc)
target_compile_definitions(reference_test PRIVATE
  REFERENCE_FILE="${CMAKE_CURRENT_SOURCE_DIR}/reference/lenet_ddp.safetensors"
  OPTIMIZER_REFERENCE="${CMAKE_CURRENT_SOURCE_DIR}/reference/optimizers.safetensors")
