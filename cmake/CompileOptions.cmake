# SPDX-License-Identifier: Apache-2.0
# How everything in this project is compiled.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/lib)

# The oldest x86-64 that lockstep runs on; wider vectors are chosen at run time.
if(CMAKE_SYSTEM_PROCESSOR STREQUAL "x86_64")
  add_compile_options(-march=x86-64-v3)
endif()

# -O3 is for the kernels only (lockstep/CMakeLists.txt); elsewhere it costs compile time and gains nothing.
set(CMAKE_CXX_FLAGS_RELEASE "-O2 -DNDEBUG")

# Compiles the sources of a target as `units` units of equal size. The headers of torch, and what they instantiate, cost
# each unit about 10 s, so a few large units are compiled several times as fast as many small ones (docs/design/build.md).
function(lockstep_unity target units)
  if(LOCKSTEP_UNITY)
    get_target_property(sources ${target} SOURCES)
    list(LENGTH sources count)
    math(EXPR batch "(${count} + ${units} - 1) / ${units}")
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE ${batch})
    # False alarms about sources that share a unit; the dev preset compiles each by itself.
    target_compile_options(${target} PRIVATE -Wno-subobject-linkage -Wno-shadow)
  endif()
endfunction()

# One set of flags for libraries and programs, so that they can share one precompiled header.
add_compile_options(-fPIC -pthread -Wall -Wextra -Wpedantic -Wshadow -Wnon-virtual-dtor -Woverloaded-virtual
  -Wno-missing-field-initializers  # designated initialisers leave out what keeps its default
  -Wno-restrict)                   # false alarms of g++ 12 on std::string (gcc bug 105651)
add_link_options(-pthread)
if(LOCKSTEP_SANITIZE)
  # vptr: Gloo inside libtorch is newer than Debian's headers, and its objects' types look strange to it.
  add_compile_options(-fsanitize=${LOCKSTEP_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=undefined
    -fno-sanitize=vptr)
  add_link_options(-fsanitize=${LOCKSTEP_SANITIZE})
endif()

if(LOCKSTEP_TORCH)
  # libtorch is built with NDEBUG. Without it some of its classes have members that the library does not know.
  add_compile_definitions($<$<CONFIG:Debug>:NDEBUG>)
endif()

find_program(MOLD mold)
if(MOLD)
  add_link_options(-fuse-ld=mold)
endif()
find_program(CCACHE ccache)
if(CCACHE)
  # pch_defines and time_macros are what ccache asks for before it caches files that use a precompiled header.
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros ${CCACHE})
endif()
