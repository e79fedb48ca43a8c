# SPDX-License-Identifier: Apache-2.0
# Imported targets for libtorch out of its PyPI wheel: lockstep::torch_cpu, and with CUDA lockstep::torch_cuda.
#
# find_package(Torch) is not used: on the wheel it fails without a CUDA toolkit and links libtorch_cuda either way.
# The same file serves this build and programs that use the installed library.
#
#   LOCKSTEP_TORCH_DIR         the folder of the wheel that holds include/ and lib/ (site-packages/torch). If it is not set: what
#                              the environment says, else the torch that Python finds
#   LOCKSTEP_BUILT_FOR_TORCH   the release that an installed lockstep was built for: libtorch's C++ interface changes with each
#   LOCKSTEP_TORCH_VERSION     which release is there, such as 2.15

if(NOT LOCKSTEP_TORCH_DIR)
  set(LOCKSTEP_TORCH_DIR $ENV{LOCKSTEP_TORCH_DIR})
endif()
if(NOT LOCKSTEP_TORCH_DIR)
  find_package(Python3 QUIET COMPONENTS Interpreter)
  set(lockstep_find_torch
    "from importlib.util import find_spec; torch = find_spec('torch'); print(*(torch.submodule_search_locations if torch else []), end='')")
endif()
foreach(lockstep_option -B -E)  # -E: pip's isolated builds hide the environment's packages by a PYTHONPATH
  if(NOT LOCKSTEP_TORCH_DIR AND Python3_FOUND)
    execute_process(COMMAND ${Python3_EXECUTABLE} ${lockstep_option} -c "${lockstep_find_torch}" OUTPUT_VARIABLE LOCKSTEP_TORCH_DIR)
  endif()
endforeach()
if(NOT EXISTS ${LOCKSTEP_TORCH_DIR}/lib/libtorch_cpu.so)
  message(FATAL_ERROR "lockstep: no libtorch in '${LOCKSTEP_TORCH_DIR}'.\n"
    "  next: pip install torch, or run tools/setup.sh demo in a checkout,\n"
    "        or set LOCKSTEP_TORCH_DIR=<site-packages>/torch in the environment")
endif()
file(STRINGS ${LOCKSTEP_TORCH_DIR}/version.py lockstep_torch_found REGEX "^__version__")
string(REGEX MATCH "[0-9]+\\.[0-9]+" LOCKSTEP_TORCH_VERSION ${lockstep_torch_found})
if(LOCKSTEP_BUILT_FOR_TORCH AND NOT LOCKSTEP_TORCH_VERSION VERSION_EQUAL LOCKSTEP_BUILT_FOR_TORCH)
  message(FATAL_ERROR "lockstep: built for torch ${LOCKSTEP_BUILT_FOR_TORCH}; ${LOCKSTEP_TORCH_DIR} has ${LOCKSTEP_TORCH_VERSION}.\n"
    "  likely: torch was updated after lockstep was installed\n"
    "  next: pip install torch==${LOCKSTEP_BUILT_FOR_TORCH}.*, or set -DLOCKSTEP_TORCH_DIR=<site-packages>/torch")
elseif(LOCKSTEP_TORCH_VERSION VERSION_LESS 2.11)
  message(FATAL_ERROR "lockstep: needs torch 2.11 or later; ${LOCKSTEP_TORCH_DIR} has ${LOCKSTEP_TORCH_VERSION}.\n"
    "  next: pip install torch, or set -DLOCKSTEP_TORCH_DIR=<site-packages>/torch")
elseif(LOCKSTEP_TORCH_VERSION VERSION_GREATER 2.15)
  message(WARNING "lockstep: torch ${LOCKSTEP_TORCH_VERSION} is newer than any that was tried. tests/versions.sh ${LOCKSTEP_TORCH_VERSION} tries it")
endif()

# The CUDA libraries that the wheel depends on stand beside it; the linker looks through them, programs find them
# through the wheel's own run path.
file(GLOB lockstep_nvidia_lib_dirs ${LOCKSTEP_TORCH_DIR}/../nvidia/*/lib)
list(TRANSFORM lockstep_nvidia_lib_dirs PREPEND "-Wl,-rpath-link,")

foreach(library c10 torch_cpu)
  add_library(lockstep::${library} SHARED IMPORTED)
  set_target_properties(lockstep::${library} PROPERTIES
    IMPORTED_LOCATION ${LOCKSTEP_TORCH_DIR}/lib/lib${library}.so)
endforeach()
target_include_directories(lockstep::c10 SYSTEM INTERFACE
  ${LOCKSTEP_TORCH_DIR}/include ${LOCKSTEP_TORCH_DIR}/include/torch/csrc/api/include)
# libstdc++ first: the wheel's libraries export copies of std::filesystem from another libstdc++, and whichever library
# stands first in a program is the one that is called.
target_link_options(lockstep::c10 INTERFACE
  -Wl,--push-state,--no-as-needed,-lstdc++,--pop-state ${lockstep_nvidia_lib_dirs} -Wl,--disable-new-dtags)
target_link_libraries(lockstep::torch_cpu INTERFACE lockstep::c10)

# With CUDA: the headers of the toolkit and of NCCL come out of the wheel's own dependencies; no toolkit is needed.
if(LOCKSTEP_CUDA)
  set(lockstep_nvidia_dir ${LOCKSTEP_TORCH_DIR}/../nvidia)
  if(NOT EXISTS ${LOCKSTEP_TORCH_DIR}/lib/libtorch_cuda.so OR NOT EXISTS ${lockstep_nvidia_dir}/nccl/include/nccl.h)
    message(FATAL_ERROR "lockstep: no CUDA libraries beside ${LOCKSTEP_TORCH_DIR}.\n"
      "  next: run tools/setup.sh pytorch, or point -DLOCKSTEP_TORCH_DIR at a full installation of torch")
  endif()
  foreach(library c10_cuda torch_cuda)
    add_library(lockstep::${library} SHARED IMPORTED)
    set_target_properties(lockstep::${library} PROPERTIES
      IMPORTED_LOCATION ${LOCKSTEP_TORCH_DIR}/lib/lib${library}.so)
    target_link_libraries(lockstep::${library} INTERFACE lockstep::c10)
  endforeach()
  target_link_libraries(lockstep::torch_cuda INTERFACE lockstep::c10_cuda)
  target_include_directories(lockstep::c10_cuda SYSTEM INTERFACE
    ${lockstep_nvidia_dir}/cu13/include ${lockstep_nvidia_dir}/nccl/include)
endif()
