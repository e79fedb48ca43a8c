# SPDX-License-Identifier: Apache-2.0
# Where libtorch is while lockstep itself is built, unless -DLOCKSTEP_TORCH_DIR says it: in .deps/ (tools/setup.sh), or where
# LockstepLibtorch.cmake finds it. A link stands for its target, so that another release behind the link compiles all anew.
if(NOT LOCKSTEP_TORCH_DIR AND EXISTS ${PROJECT_SOURCE_DIR}/.deps/libtorch/torch)
  set(LOCKSTEP_TORCH_DIR ${PROJECT_SOURCE_DIR}/.deps/libtorch/torch)
endif()
if(LOCKSTEP_TORCH_DIR)
  file(REAL_PATH ${LOCKSTEP_TORCH_DIR} LOCKSTEP_TORCH_DIR)
endif()
