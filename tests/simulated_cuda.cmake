# SPDX-License-Identifier: Apache-2.0
# GPUs made of host memory (docs/design/simulated-cuda.md): build/*/lib/liblockstep_simulated_cuda.so, never installed.
if(LOCKSTEP_CUDA)
  return()  # there CUDA is libtorch_cuda's
endif()

file(GLOB simulator_sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/simulated_cuda/*.cc)
list(FILTER simulator_sources EXCLUDE REGEX "_test\\.cc$")
add_library(lockstep_simulated_cuda SHARED ${simulator_sources})
target_include_directories(lockstep_simulated_cuda PUBLIC ${PROJECT_SOURCE_DIR})
target_compile_options(lockstep_simulated_cuda PRIVATE -O1)
target_precompile_headers(lockstep_simulated_cuda REUSE_FROM lockstep_pch)
target_compile_definitions(lockstep_simulated_cuda PRIVATE USE_C10D_GLOO)
target_link_libraries(lockstep_simulated_cuda PUBLIC lockstep::torch_cpu PRIVATE ${CMAKE_DL_LIBS})
lockstep_unity(lockstep_simulated_cuda 2)

file(GLOB simulator_tests CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/simulated_cuda/*_test.cc)
lockstep_torch_test(simulated_cuda_test simulated_cuda SHARDS 1 TIMEOUT 900 CHECK "*" SOURCES ${simulator_tests})
target_link_libraries(simulated_cuda_test PRIVATE lockstep_simulated_cuda)
