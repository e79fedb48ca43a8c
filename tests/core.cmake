# SPDX-License-Identifier: Apache-2.0
# The rooms without torch: the tests that the tsan preset runs.
add_executable(rank_probe launch/rank_probe.cc)
target_link_libraries(rank_probe PRIVATE lockstep_core)

lockstep_tests_in(beside_sources base observe ../agent)
lockstep_test(core_test core SHARDS 4 TIMEOUT 300 CHECK "*Mpirun*"
  SOURCES launch/child.cc launch/command_test.cc launch/mpirun_test.cc ${beside_sources})
target_compile_definitions(core_test PRIVATE
  LOCKSTEP_COMMAND="$<TARGET_FILE:lockstep_command>"
  RANK_PROBE="$<TARGET_FILE:rank_probe>"
)
target_link_libraries(core_test PRIVATE lockstep_core)
add_dependencies(core_test lockstep_command rank_probe)

lockstep_tests_in(beside_sources collective/shm)
lockstep_test(shm_test shm SHARDS 4 TIMEOUT 7200 CHECK "collectives.reduce_more_than_2_gib"
  SOURCES shm/faults_test.cc shm/stress_test.cc ${beside_sources})
target_link_libraries(shm_test PRIVATE lockstep_core)

# What the tools in Python say about jobs that are made up.
add_test(NAME tools COMMAND ${Python3_EXECUTABLE} -B ${CMAKE_CURRENT_SOURCE_DIR}/tools_test.py)
set_tests_properties(tools PROPERTIES TIMEOUT 60 LABELS quick)

# `lockstep top` beside running jobs, also in a terminal (tmux).
lockstep_check(top.beside_jobs 300 ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/top_test.py
  $<TARGET_FILE:lockstep_command> $<TARGET_FILE:rank_probe>)
