# SPDX-License-Identifier: Apache-2.0
# A binary with torch.
function(lockstep_torch_test target prefix)
  lockstep_test(${target} ${prefix} ${ARGN})
  target_precompile_headers(${target} REUSE_FROM lockstep_pch)
  target_link_libraries(${target} PRIVATE lockstep)
endfunction()

# Tests whose helpers have the names of others' helpers: they are compiled alone.
foreach(alone data/images/image_dataset gradient/shared_gradients strategy/convergence
    strategy/devices/device_faults strategy/lossless)
  set_source_files_properties(${PROJECT_SOURCE_DIR}/lockstep/${alone}_test.cc PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
endforeach()
set_source_files_properties(reference/optimizer_reference_test.cc PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)

# A binary per room: the tests that stand beside its sources.
function(lockstep_room_test room shards)
  lockstep_tests_in(sources ${room})
  list(FILTER sources EXCLUDE REGEX "/collective/shm/|_fuzz_test")
  lockstep_torch_test(${room}_test ${room} SHARDS ${shards} TIMEOUT 900 SOURCES ${sources})
endfunction()

lockstep_room_test(collective 8)
lockstep_room_test(data 4)
lockstep_room_test(model 2)
lockstep_room_test(gradient 4)
lockstep_room_test(optimizer 2)
lockstep_room_test(strategy 8)
lockstep_room_test(checkpoint 1)
lockstep_room_test(plan 1)
lockstep_room_test(train 2)
target_link_libraries(data_test PRIVATE ZLIB::ZLIB PNG::PNG ${ZIP_LIBRARY})
target_link_libraries(train_test PRIVATE nlohmann_json::nlohmann_json ${XXHASH_LIBRARY})

# Mutated files, in a binary of its own: `make soak` gives it hours.
lockstep_torch_test(data_fuzz_test data.fuzz SHARDS 2 TIMEOUT 14400
  SOURCES ${PROJECT_SOURCE_DIR}/lockstep/data/formats/readers_fuzz_test.cc)
target_link_libraries(data_fuzz_test PRIVATE PNG::PNG ${ZIP_LIBRARY})

# Random programs over the API of a step; and the same beside deliberate defects, for which some sources of the library are
# compiled again into the test (lockstep/base/defects.h).
set(step_fuzz_sources generator meetings processes program rank reference reference_hook reference_optimizer rules run)
list(TRANSFORM step_fuzz_sources REPLACE "(.+)" "step_fuzz/\\1.cc")
lockstep_torch_test(step_fuzz step_fuzz SHARDS 2 TIMEOUT 14400 SOURCES ${step_fuzz_sources} step_fuzz/strategy_program.cc
  step_fuzz/step_fuzz_test.cc step_fuzz/strategy_fuzz_test.cc)
foreach(source gradient/communication_hook gradient/local_gradients gradient/reducer gradient/shared_gradients gradient/step_agreement
    model/sync_batch_norm optimizer/flat_update optimizer/run_writer
    optimizer/update_journal strategy/ddp/ddp)
  list(APPEND sources_with_defects ${PROJECT_SOURCE_DIR}/lockstep/${source}.cc)
endforeach()
set_source_files_properties(${sources_with_defects} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
lockstep_torch_test(step_fuzz_defects step_fuzz.defects SHARDS 2 TIMEOUT 1200
  SOURCES ${step_fuzz_sources} step_fuzz/step_fuzz_defects_test.cc ${sources_with_defects})
target_compile_definitions(step_fuzz_defects PRIVATE LOCKSTEP_DEFECTS)
set_target_properties(step_fuzz_defects PROPERTIES ENABLE_EXPORTS ON)
target_link_libraries(step_fuzz_defects PRIVATE ${XXHASH_LIBRARY})

# Processes that are killed inside an update, and finished by others; once more beside a deliberate defect.
set(killed_update_sources killed_update/workload.cc killed_update/killed_update_test.cc)
lockstep_torch_test(killed_update optimizer.killed SHARDS 2 TIMEOUT 1200 SOURCES ${killed_update_sources})
lockstep_torch_test(killed_update_defects optimizer.killed_defects SHARDS 1 TIMEOUT 600
  SOURCES ${killed_update_sources} ${PROJECT_SOURCE_DIR}/lockstep/optimizer/flat_update.cc
    ${PROJECT_SOURCE_DIR}/lockstep/optimizer/run_writer.cc
    ${PROJECT_SOURCE_DIR}/lockstep/optimizer/update_journal.cc)
target_compile_definitions(killed_update_defects PRIVATE LOCKSTEP_DEFECTS)
set_target_properties(killed_update_defects PROPERTIES ENABLE_EXPORTS ON)

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

lockstep_test(command_test command SHARDS 8 TIMEOUT 600
  SOURCES train/command_test.cc train/data_command_test.cc train/kvstore_command_test.cc train/plan_command_test.cc security/one_machine_test.cc launch/child.cc)
target_link_libraries(command_test PRIVATE lockstep_core nlohmann_json::nlohmann_json)
target_compile_definitions(command_test PRIVATE
  LOCKSTEP_COMMAND="$<TARGET_FILE:lockstep_command>" MISBEHAVING_TASK="$<TARGET_FILE:misbehaving_task>"
  SLOW_LENET="$<TARGET_FILE:slow_lenet>")
add_dependencies(command_test lockstep_train lockstep_data lockstep_plan misbehaving_task slow_lenet)

lockstep_test(compare_test command.compare SHARDS 4 TIMEOUT 600 SOURCES train/compare_command_test.cc launch/child.cc)
target_link_libraries(compare_test PRIVATE lockstep_core nlohmann_json::nlohmann_json)
target_compile_definitions(compare_test PRIVATE LOCKSTEP_COMMAND="$<TARGET_FILE:lockstep_command>")
add_dependencies(compare_test lockstep_command lockstep_compare lockstep_train)

lockstep_test(lost_ranks_test command.lost_ranks SHARDS 4 TIMEOUT 600
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
target_link_libraries(recovery_test PRIVATE lockstep_core nlohmann_json::nlohmann_json)
target_compile_definitions(recovery_test PRIVATE
  LOCKSTEP_COMMAND="$<TARGET_FILE:lockstep_command>" FRAGILE_TASK="$<TARGET_FILE:fragile_task>"
  OTHER_PROGRAM="$<TARGET_FILE:misbehaving_task>")
add_dependencies(recovery_test fragile_task misbehaving_task lockstep_command lockstep_train)

lockstep_torch_test(reference_test reference SHARDS 2 TIMEOUT 300
  SOURCES reference/ddp_reference_test.cc reference/optimizer_reference_test.cc)
target_compile_definitions(reference_test PRIVATE
  REFERENCE_FILE="${CMAKE_CURRENT_SOURCE_DIR}/reference/lenet_ddp.safetensors"
  OPTIMIZER_REFERENCE="${CMAKE_CURRENT_SOURCE_DIR}/reference/optimizers.safetensors")

# Real disks, and real memory.
add_test(NAME command.full_disk COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/train/full_disk_test.sh $<TARGET_FILE:lockstep_command>)
set_tests_properties(command.full_disk PROPERTIES TIMEOUT 300)
if(NOT LOCKSTEP_SANITIZE)  # sanitizers have memory of their own
  add_test(NAME command.memory_of_resuming
    COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/train/resume_memory_test.py $<TARGET_FILE:lockstep_command>)
  set_tests_properties(command.memory_of_resuming PROPERTIES TIMEOUT 300)
endif()

# Several machines, as network namespaces.
add_library(drifting_clock MODULE hosts/drifting_clock.cc)
add_test(NAME hosts.two_hosts_train_as_one_rank_does
  COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/hosts/two_hosts_test.sh $<TARGET_FILE:lockstep_command> $<TARGET_FILE:drifting_clock>)
set_tests_properties(hosts.two_hosts_train_as_one_rank_does PROPERTIES TIMEOUT 120)

add_test(NAME hosts.ranks_find_each_other
  COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/hosts/launchers_test.sh $<TARGET_FILE:lockstep_command>)
add_test(NAME hosts.membership
  COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/hosts/membership_test.sh $<TARGET_FILE:lockstep_command>)
set_tests_properties(hosts.membership PROPERTIES TIMEOUT 300)
add_test(NAME hosts.lost_machine
  COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/hosts/lost_machine_test.sh $<TARGET_FILE:lockstep_command>)
set_tests_properties(hosts.lost_machine PROPERTIES TIMEOUT 300)
add_test(NAME hosts.bad_links
  COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/hosts/bad_links_test.sh $<TARGET_FILE:lockstep_command> $<TARGET_FILE:misbehaving_task>)
add_test(NAME hosts.lost_stage
  COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/hosts/lost_stage_test.sh $<TARGET_FILE:lockstep_command> $<TARGET_FILE:misbehaving_task>)
set_tests_properties(hosts.bad_links hosts.lost_stage PROPERTIES TIMEOUT 300)
add_test(NAME hosts.security
  COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/security/network_test.sh $<TARGET_FILE:lockstep_command>)
add_test(NAME hosts.munge
  COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/security/munge_test.sh $<TARGET_FILE:lockstep_command>)
add_test(NAME hosts.fuzz
  COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/security/fuzz_test.sh $<TARGET_FILE:lockstep_command>)
set_tests_properties(hosts.fuzz PROPERTIES TIMEOUT 3600)
add_test(NAME hosts.slurm COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/hosts/slurm_test.sh $<TARGET_FILE:lockstep_command>)
add_test(NAME hosts.compare COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/hosts/compare_test.sh $<TARGET_FILE:lockstep_command>)
set_tests_properties(hosts.ranks_find_each_other hosts.security hosts.munge hosts.slurm hosts.compare PROPERTIES TIMEOUT 300)

add_executable(pattern_ranks security/pattern_ranks.cc)
target_link_libraries(pattern_ranks PRIVATE lockstep)
target_precompile_headers(pattern_ranks REUSE_FROM lockstep_pch)
add_test(NAME hosts.security_of_tensors
  COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/security/tensors_test.sh $<TARGET_FILE:lockstep_command> $<TARGET_FILE:pattern_ranks>)
set_tests_properties(hosts.security_of_tensors PROPERTIES TIMEOUT 120)

# A user's own project against the install tree: as it is installed, so without sanitizers.
if(NOT LOCKSTEP_SANITIZE)
  add_test(NAME install.a_users_project_builds_and_trains
    COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/install_test.sh ${CMAKE_BINARY_DIR})
  set_tests_properties(install.a_users_project_builds_and_trains PROPERTIES TIMEOUT 900)
endif()

# The wheel and the package of Debian, which `make wheel deb` has packed from this build.
if(CMAKE_BUILD_TYPE STREQUAL "Release" AND NOT LOCKSTEP_SANITIZE AND NOT LOCKSTEP_CUDA)
  foreach(package wheel deb)
    add_test(NAME install.the_${package} COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/${package}_test.py
      ${PROJECT_SOURCE_DIR}/dist)
    set_tests_properties(install.the_${package} PROPERTIES TIMEOUT 2700)
  endforeach()
  # The documentation as a site, in a browser.
  add_test(NAME docs.the_site COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/docs_test.py)
  set_tests_properties(docs.the_site PROPERTIES TIMEOUT 1200)
endif()

# What README says under "The command".
add_test(NAME readme.the_commands_work
  COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/readme_test.py $<TARGET_FILE:lockstep_command>)
set_tests_properties(readme.the_commands_work PROPERTIES TIMEOUT 300)

# The curves of a run, read with TensorBoard's package.
add_test(NAME command.curves_are_what_tensorboard_reads
  COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/tensorboard_test.py $<TARGET_FILE:lockstep_command>)
set_tests_properties(command.curves_are_what_tensorboard_reads PROPERTIES TIMEOUT 300)

# Checkpoints, read with the safetensors package.
add_test(NAME command.checkpoints_are_what_safetensors_reads
  COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/safetensors_test.py $<TARGET_FILE:lockstep_command>)
set_tests_properties(command.checkpoints_are_what_safetensors_reads PROPERTIES TIMEOUT 300)

# A checkpoint folder with foreign files, kills, and disks that are full or fail; LOCKSTEP_FOLDER_FUZZ makes it longer.
add_executable(folder_program checkpoint_folder/folder_program.cc)
target_link_libraries(folder_program PRIVATE lockstep)
target_precompile_headers(folder_program REUSE_FROM lockstep_pch)
add_test(NAME checkpoint.folder_fuzz
  COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/checkpoint_folder/fuzz.py $<TARGET_FILE:folder_program>)
set_tests_properties(checkpoint.folder_fuzz PROPERTIES TIMEOUT 14400)

# Timelines of runs that end well and of one that loses a rank.
add_test(NAME command.a_trace_shows_what_every_rank_does
  COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/trace_test.py $<TARGET_FILE:lockstep_command>
    $<TARGET_FILE:misbehaving_task> $<TARGET_FILE:unusual_loop>)
set_tests_properties(command.a_trace_shows_what_every_rank_does PROPERTIES TIMEOUT 300)

# `lockstep top` and `lockstep trace JOB` beside training.
add_test(NAME command.top_beside_training
  COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/top_test.py --train $<TARGET_FILE:lockstep_command> $<TARGET_FILE:slow_lenet>)
set_tests_properties(command.top_beside_training PROPERTIES TIMEOUT 300)

# Pages of `lockstep report` in headless Chromium, and what it says of files that are damaged.
add_test(NAME command.a_report_shows_what_runs_did
  COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/report_test.py $<TARGET_FILE:lockstep_command>)
set_tests_properties(command.a_report_shows_what_runs_did PROPERTIES TIMEOUT 300)

# The memory of stages: of what they can't do without, at most 1.15 times as much.
if(LOCKSTEP_BENCH AND NOT LOCKSTEP_SANITIZE)
  add_test(NAME command.a_stage_takes_little_more_memory_than_it_needs
    COMMAND $<TARGET_FILE:lockstep_command> bench memory --models gpt-mini,resnet18-32 --stages 2 --at-most 1.15)
  set_tests_properties(command.a_stage_takes_little_more_memory_than_it_needs PROPERTIES TIMEOUT 300)
  # Forecasts for up to 1,024 machines, which take seconds.
  add_test(NAME command.published_scaling_is_forecast_in_seconds COMMAND $<TARGET_FILE:lockstep_command> bench plan --curves)
  set_tests_properties(command.published_scaling_is_forecast_in_seconds PROPERTIES TIMEOUT 180)
  # Forecasts beside measurements that were kept.
  add_test(NAME command.forecasts_are_as_good_as_they_were
    COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/planner_test.py $<TARGET_FILE:lockstep_command>
      ${PROJECT_SOURCE_DIR}/bench/results)
  set_tests_properties(command.forecasts_are_as_good_as_they_were PROPERTIES TIMEOUT 600)
endif()

# The barriers of a step as a model that Spin checks exhaustively, with two and three ranks (10 s).
find_program(SPIN spin REQUIRED)
add_test(NAME gradient.step_protocol_model COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/shm/check_protocol.sh
  ${PROJECT_SOURCE_DIR}/lockstep/gradient/step_protocol.pml)
set_tests_properties(gradient.step_protocol_model PROPERTIES TIMEOUT 300)

include(simulated_cuda.cmake)
include(gpus.cmake)
