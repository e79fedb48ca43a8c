# SPDX-License-Identifier: Apache-2.0
# The rooms without torch: the tests that the tsan preset runs.
add_executable(rank_probe launch/rank_probe.cc)
target_link_libraries(rank_probe PRIVATE lockstep_core)

lockstep_tests_in(beside_sources base launch)
lockstep_test(core_test core SHARDS 4 TIMEOUT 300
  SOURCES launch/child.cc launch/command_test.cc launch/mpirun_test.cc ${beside_sources})
target_compile_definitions(core_test PRIVATE
  LOCKSTEP_COMMAND="$<TARGET_FILE:lockstep_command>"
  RANK_PROBE="$<TARGET_FILE:rank_probe>"
)
target_link_libraries(core_test PRIVATE lockstep_core)
add_dependencies(core_test lockstep_command rank_probe)

# What `lockstep top` makes of two looks at a job.
find_package(nlohmann_json REQUIRED)
foreach(source json layout verdict view)
  list(APPEND top_sources ${PROJECT_SOURCE_DIR}/cli/top/${source}.cc)
endforeach()
lockstep_test(top_test top SHARDS 1 TIMEOUT 60 SOURCES ${PROJECT_SOURCE_DIR}/cli/top/jobs.cc ${top_sources}
  ${PROJECT_SOURCE_DIR}/cli/top/layout_test.cc ${PROJECT_SOURCE_DIR}/cli/top/verdict_test.cc)
target_link_libraries(top_test PRIVATE lockstep_core nlohmann_json::nlohmann_json)

# `lockstep top` beside running jobs, also in a terminal.
find_program(TMUX tmux REQUIRED)
find_package(Python3 REQUIRED COMPONENTS Interpreter)
add_test(NAME top.beside_jobs COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/top_test.py
  $<TARGET_FILE:lockstep_command> $<TARGET_FILE:rank_probe>)
set_tests_properties(top.beside_jobs PROPERTIES TIMEOUT 300)

# The agreement of launchers as a model that Spin checks exhaustively (20 s).
find_program(SPIN spin REQUIRED)
add_test(NAME launch.membership_model COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/hosts/check_membership.sh
  ${PROJECT_SOURCE_DIR}/lockstep/launch/membership.pml)
set_tests_properties(launch.membership_model PROPERTIES TIMEOUT 300)

# The layout: who includes whom, the map in HACKING.md, the programs in README.md.
find_package(Python3 REQUIRED COMPONENTS Interpreter)
add_test(NAME layout.the_rooms_are_in_order COMMAND ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/tools/check_rooms.py)
