# SPDX-License-Identifier: Apache-2.0
# Where libtorch is while lockstep itself is built, unless -DLOCKSTEP_TORCH_DIR says it: in .deps/ (tools/setup.sh), or in
# the Python environment. pip's isolated builds hide that environment from Python, but not from this.
if(LOCKSTEP_TORCH_DIR)
  return()
endif()
set(LOCKSTEP_TORCH_DIR ${PROJECT_SOURCE_DIR}/.deps/libtorch/torch)
if(NOT EXISTS ${LOCKSTEP_TORCH_DIR})
  find_package(Python3 REQUIRED COMPONENTS Interpreter)
  execute_process(COMMAND ${Python3_EXECUTABLE} -c "import sysconfig; print(sysconfig.get_path('platlib'), end='/torch')"
    OUTPUT_VARIABLE LOCKSTEP_TORCH_DIR COMMAND_ERROR_IS_FATAL ANY)
endif()
