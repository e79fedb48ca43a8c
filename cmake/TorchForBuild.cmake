# SPDX-License-Identifier: Apache-2.0
# Where libtorch is while lockstep itself is built, unless -DLOCKSTEP_TORCH_DIR says it: in .deps/ (tools/setup.sh), or in
# the Python environment. pip's isolated builds hide that environment from Python, but not from this.
# A link stands for its target, so that another release behind the link compiles all anew.
if(LOCKSTEP_TORCH_DIR)
  file(REAL_PATH ${LOCKSTEP_TORCH_DIR} LOCKSTEP_TORCH_DIR)
  return()
endif()
file(REAL_PATH .deps/libtorch/torch LOCKSTEP_TORCH_DIR BASE_DIRECTORY ${PROJECT_SOURCE_DIR})
if(NOT EXISTS ${LOCKSTEP_TORCH_DIR})
  find_package(Python3 REQUIRED COMPONENTS Interpreter)
  execute_process(COMMAND ${Python3_EXECUTABLE} -c "import sysconfig; print(sysconfig.get_path('platlib'), end='/torch')"
    OUTPUT_VARIABLE LOCKSTEP_TORCH_DIR COMMAND_ERROR_IS_FATAL ANY)
endif()
