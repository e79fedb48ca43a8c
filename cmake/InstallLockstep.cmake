# SPDX-License-Identifier: Apache-2.0
# cmake --install: the library, its headers, the command, and a package that find_package(lockstep) finds.
include(CMakePackageConfigHelpers)

set(lockstep_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/lockstep)

# The libraries of the wheel stay where they are; everything else finds its neighbours relative to itself.
set_target_properties(lockstep PROPERTIES INSTALL_RPATH "$ORIGIN;${LOCKSTEP_TORCH_DIR}/lib")
set_target_properties(lockstep_train lockstep_verify lockstep_data PROPERTIES
  INSTALL_RPATH "$ORIGIN/../../${CMAKE_INSTALL_LIBDIR};${LOCKSTEP_TORCH_DIR}/lib")

install(TARGETS lockstep EXPORT lockstepTargets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(TARGETS lockstep_command RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(TARGETS lockstep_train lockstep_verify lockstep_data RUNTIME DESTINATION libexec/lockstep)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/lockstep DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")

configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/lockstepConfig.cmake.in lockstepConfig.cmake
  INSTALL_DESTINATION ${lockstep_package_dir})
write_basic_package_version_file(lockstepConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(EXPORT lockstepTargets NAMESPACE lockstep:: DESTINATION ${lockstep_package_dir})
install(FILES
  ${CMAKE_CURRENT_BINARY_DIR}/lockstepConfig.cmake
  ${CMAKE_CURRENT_BINARY_DIR}/lockstepConfigVersion.cmake
  ${CMAKE_CURRENT_LIST_DIR}/LockstepLibtorch.cmake
  DESTINATION ${lockstep_package_dir})
