# SPDX-License-Identifier: Apache-2.0
# A test of a fuzzer beside deliberate defects: the patch puts them into copies of some sources of the library, which are
# compiled into the test, where their symbols come before the library's. As a script (cmake -P) this file makes the copies.
if(CMAKE_SCRIPT_MODE_FILE)
  file(REMOVE_RECURSE ${TO})
  foreach(path ${PATHS})
    configure_file(${FROM}/${path} ${TO}/${path} COPYONLY)
  endforeach()
  execute_process(COMMAND patch -p1 --fuzz=0 --no-backup-if-mismatch --input ${PATCH} WORKING_DIRECTORY ${TO} RESULT_VARIABLE failed)
  if(failed)
    message(FATAL_ERROR "${PATCH} does not apply any more: a line that it changes has changed. Its head says how to mend it.")
  endif()
  foreach(path ${PATHS})
    file(READ ${TO}/${path} content)
    file(WRITE ${TO}/${path} "#include \"tests/defects.h\"\n${content}")
  endforeach()
  return()
endif()

# paths of the library's sources that are compiled again with the patched ones: those that include a patched header.
function(lockstep_defects target patch)
  set(patch ${CMAKE_CURRENT_SOURCE_DIR}/${patch})
  set(folder ${CMAKE_CURRENT_BINARY_DIR}/${target}.sources)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${patch})
  file(STRINGS ${patch} paths REGEX "^\\+\\+\\+ b/")
  list(TRANSFORM paths REPLACE "^... b/([^\t]+).*" "\\1")
  list(TRANSFORM paths PREPEND ${folder}/ OUTPUT_VARIABLE copies)
  list(TRANSFORM paths PREPEND ${PROJECT_SOURCE_DIR}/ OUTPUT_VARIABLE originals)
  add_custom_command(OUTPUT ${copies} DEPENDS ${originals} ${patch} ${CMAKE_CURRENT_SOURCE_DIR}/defects.cmake VERBATIM
    COMMAND ${CMAKE_COMMAND} -D FROM=${PROJECT_SOURCE_DIR} -D TO=${folder} -D PATCH=${patch} "-DPATHS=${paths}"
      -P ${CMAKE_CURRENT_SOURCE_DIR}/defects.cmake)
  list(TRANSFORM ARGN PREPEND ${PROJECT_SOURCE_DIR}/)
  set(sources ${copies} ${ARGN})
  target_sources(${target} PRIVATE ${sources})
  set_source_files_properties(${sources} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
  target_include_directories(${target} BEFORE PRIVATE ${folder})
  set_target_properties(${target} PROPERTIES ENABLE_EXPORTS ON)
endfunction()
