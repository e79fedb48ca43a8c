# SPDX-License-Identifier: Apache-2.0
# The shared-memory core of collective/: no torch, so the tsan preset runs it too. lockstep_core carries its sources.
lockstep_tests_in(beside_sources collective/shm)
lockstep_test(shm_test shm SHARDS 4 TIMEOUT 7200 SOURCES shm/faults_test.cc shm/stress_test.cc ${beside_sources})
target_link_libraries(shm_test PRIVATE lockstep_core)

# The protocol's model, checked exhaustively (Debian's package spin; 15 s).
find_program(SPIN spin REQUIRED)
add_test(NAME shm.protocol_model COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/shm/check_protocol.sh
  ${PROJECT_SOURCE_DIR}/lockstep/collective/shm/protocol.pml)
set_tests_properties(shm.protocol_model PROPERTIES TIMEOUT 120)

# The recovery of lost ranks as a model, and its deliberate defects (3 min).
add_test(NAME launch.recovery_model COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/recovery/check_model.sh
  ${PROJECT_SOURCE_DIR}/lockstep/launch/recovery.pml)
set_tests_properties(launch.recovery_model PROPERTIES TIMEOUT 1200)
