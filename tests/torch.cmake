# The rooms with torch: a binary per room.
function(lockstep_room_test room)
  lockstep_tests_in(sources ${room})
  list(FILTER sources EXCLUDE REGEX "/collective/shm/|_fuzz_test")
  add_executable(${room}_test ${sources})
  target_precompile_headers(${room}_test REUSE_FROM lockstep_pch)
  target_link_libraries(${room}_test PRIVATE lockstep GTest::gtest_main)
  gtest_discover_tests(${room}_test TEST_PREFIX ${room}. DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60
    PROPERTIES TIMEOUT 120)
endfunction()

foreach(room collective data model gradient optimizer strategy checkpoint train)
  lockstep_room_test(${room})
endforeach()
target_link_libraries(data_test PRIVATE ZLIB::ZLIB PNG::PNG ${ZIP_LIBRARY})
target_link_libraries(train_test PRIVATE nlohmann_json::nlohmann_json)

# Mutated files, in a binary of its own: `make soak` gives it hours.
add_executable(data_fuzz_test ${PROJECT_SOURCE_DIR}/lockstep/data/formats/readers_fuzz_test.cc)
target_precompile_headers(data_fuzz_test REUSE_FROM lockstep_pch)
target_link_libraries(data_fuzz_test PRIVATE lockstep GTest::gtest_main PNG::PNG ${ZIP_LIBRARY})
gtest_discover_tests(data_fuzz_test TEST_PREFIX data. DISCOVERY_MODE PRE_TEST PROPERTIES TIMEOUT 14400)

# Several processes.
add_executable(misbehaving_task train/misbehaving_task.cc)
target_precompile_headers(misbehaving_task REUSE_FROM lockstep_pch)
target_link_libraries(misbehaving_task PRIVATE lockstep)

add_executable(command_test train/command_test.cc train/data_command_test.cc train/kvstore_command_test.cc launch/child.cc)
target_compile_definitions(command_test PRIVATE
  LOCKSTEP_COMMAND="$<TARGET_FILE:lockstep_command>" MISBEHAVING_TASK="$<TARGET_FILE:misbehaving_task>")
target_link_libraries(command_test PRIVATE lockstep_core GTest::gtest_main nlohmann_json::nlohmann_json)
add_dependencies(command_test lockstep_train lockstep_data misbehaving_task)
gtest_discover_tests(command_test TEST_PREFIX command. DISCOVERY_MODE PRE_TEST PROPERTIES TIMEOUT 120)

add_executable(lost_ranks_test train/lost_ranks_test.cc train/ranks.cc launch/child.cc)
target_compile_definitions(lost_ranks_test PRIVATE MISBEHAVING_TASK="$<TARGET_FILE:misbehaving_task>")
target_link_libraries(lost_ranks_test PRIVATE lockstep_core GTest::gtest_main nlohmann_json::nlohmann_json)
add_dependencies(lost_ranks_test misbehaving_task)
gtest_discover_tests(lost_ranks_test TEST_PREFIX command. DISCOVERY_MODE PRE_TEST PROPERTIES TIMEOUT 120)

add_executable(lossless_ranks train/lossless_ranks.cc)
add_executable(lossless_test train/lossless_command_test.cc launch/child.cc)
foreach(target lossless_ranks lossless_test)
  target_precompile_headers(${target} REUSE_FROM lockstep_pch)
  target_link_libraries(${target} PRIVATE lockstep GTest::gtest)
endforeach()
target_link_libraries(lossless_test PRIVATE GTest::gtest_main)
target_compile_definitions(lossless_test PRIVATE
  LOCKSTEP_COMMAND="$<TARGET_FILE:lockstep_command>" LOSSLESS_RANKS="$<TARGET_FILE:lossless_ranks>")
add_dependencies(lossless_test lossless_ranks lockstep_command lockstep_train)
gtest_discover_tests(lossless_test TEST_PREFIX command. DISCOVERY_MODE PRE_TEST PROPERTIES TIMEOUT 120)

add_executable(reference_test reference/ddp_reference_test.cc reference/optimizer_reference_test.cc)
target_precompile_headers(reference_test REUSE_FROM lockstep_pch)
target_compile_definitions(reference_test PRIVATE
  REFERENCE_FILE="${CMAKE_CURRENT_SOURCE_DIR}/reference/lenet_ddp.safetensors"
  OPTIMIZER_REFERENCE="${CMAKE_CURRENT_SOURCE_DIR}/reference/optimizers.safetensors")
target_link_libraries(reference_test PRIVATE lockstep GTest::gtest_main)
gtest_discover_tests(reference_test TEST_PREFIX reference. DISCOVERY_MODE PRE_TEST PROPERTIES TIMEOUT 120)

# Several hosts, as network namespaces.
add_test(NAME hosts.two_hosts_train_as_one_rank_does
  COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/hosts/two_hosts_test.sh $<TARGET_FILE:lockstep_command>)
set_tests_properties(hosts.two_hosts_train_as_one_rank_does PROPERTIES TIMEOUT 120)

# A user's own project against the install tree: as it is installed, so without sanitizers.
if(NOT LOCKSTEP_SANITIZE)
add_test(NAME install.a_users_project_builds_and_trains
  COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/install_test.sh ${CMAKE_BINARY_DIR})
set_tests_properties(install.a_users_project_builds_and_trains PROPERTIES TIMEOUT 300)
endif()
