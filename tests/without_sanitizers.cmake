# SPDX-License-Identifier: Apache-2.0
# What a sanitizer would make no difference to, or spoil.
set(here ${CMAKE_CURRENT_SOURCE_DIR})
set(command $<TARGET_FILE:lockstep_command>)

# The layout: who includes whom, the map in HACKING.md, the programs in README.md.
add_test(NAME layout.the_rooms_are_in_order COMMAND ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/tests/check_rooms.py)
add_test(NAME layout.the_docs_have_the_figures_of_bench_results COMMAND ${Python3_EXECUTABLE} -B ${PROJECT_SOURCE_DIR}/docs/site/figures.py --check)

# Protocols as models that Spin checks exhaustively; the recovery's also with deliberate defects.
set(rooms ${PROJECT_SOURCE_DIR}/lockstep)
lockstep_check(shm.protocol_model 120 ${here}/shm/check_protocol.sh ${rooms}/collective/shm/protocol.pml)
lockstep_check(step.protocol_model 300 ${here}/shm/check_protocol.sh ${rooms}/step/step_protocol.pml)
lockstep_check(launch.recovery_model 1200 ${here}/recovery/check_model.sh ${PROJECT_SOURCE_DIR}/agent/recover/recovery.pml)

# The Python package of this build, a module of tests at a time. `make test` runs those of the training step.
if(lockstep_python_modules)
  set(python_test ${Python3_EXECUTABLE} ${here}/python_test.py ${CMAKE_BINARY_DIR})
  add_dependencies(quick_tests packaged)
  add_test(NAME python.stage COMMAND ${python_test} stage)
  set_tests_properties(python.stage PROPERTIES FIXTURES_SETUP python TIMEOUT 120)
  set(quick_modules test_checkpoints test_programs test_step test_step_arguments test_step_errors test_step_groups)
  file(GLOB modules CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/python/tests/test_*.py)
  foreach(path ${modules})
    get_filename_component(module ${path} NAME_WE)
    lockstep_check(python.${module} 900 ${python_test} ${module})
    set_tests_properties(python.${module} PROPERTIES FIXTURES_REQUIRED python)
    if(module IN_LIST quick_modules)
      set_tests_properties(python.${module} PROPERTIES LABELS quick)
    endif()
  endforeach()
endif()

# Memory: of resuming, and of stages, which need at most 1.15 times what they can't do without.
lockstep_check(command.memory_of_resuming 300 ${Python3_EXECUTABLE} ${here}/train/resume_memory_test.py ${command})
if(LOCKSTEP_BENCH)
  lockstep_check(command.a_stage_takes_little_more_memory_than_it_needs 300
    ${command} bench memory --models gpt-mini,resnet18-32 --stages 2 --at-most 1.15)
  # Forecasts beside measurements that were kept.
  lockstep_check(command.forecasts_are_as_good_as_they_were 600
    ${Python3_EXECUTABLE} ${here}/planner_test.py ${command} ${PROJECT_SOURCE_DIR}/bench/results)
endif()

# What README says under "The command".
lockstep_check(readme.the_commands_work 900 ${Python3_EXECUTABLE} ${here}/readme_test.py ${command})

# A user's own project against the install tree.
lockstep_check(install.a_users_project_builds_and_trains 900 ${here}/install_test.sh ${CMAKE_BINARY_DIR})

# The wheel and the package of Debian, which `make wheel deb` has packed from this build; the documentation in a browser.
if(CMAKE_BUILD_TYPE STREQUAL "Release" AND NOT LOCKSTEP_CUDA)
  foreach(package wheel deb)
    lockstep_check(install.the_${package} 2700 ${Python3_EXECUTABLE} ${here}/${package}_test.py ${PROJECT_SOURCE_DIR}/dist)
  endforeach()
  lockstep_check(docs.the_site 1200 ${Python3_EXECUTABLE} ${here}/docs_test.py)
endif()
