# SPDX-License-Identifier: Apache-2.0
# What is installed, and where: the library, its headers, the command, and a package that find_package(lockstep) finds.
#
# Components: `lockstep` is in every installation. `local` (cmake --install alone) ties it to the libtorch of this build.
# `python` (the wheel alone) is the Python module and what a Python environment has beside it.
#
# Installed files contain no path of this machine. Torch's folder is either beside PREFIX, as in site-packages, or it is
# PREFIX/lib/lockstep/torch, a link or a folder.
include(CMakePackageConfigHelpers)

set(lockstep_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/lockstep)
set(lockstep_torch_link ${CMAKE_INSTALL_LIBDIR}/lockstep/torch)

set_target_properties(lockstep PROPERTIES INSTALL_RPATH "$ORIGIN;$ORIGIN/lockstep/torch/lib;$ORIGIN/../../torch/lib")
set(lockstep_program_rpath "$ORIGIN/../../${CMAKE_INSTALL_LIBDIR}"
  "$ORIGIN/../../${lockstep_torch_link}/lib" "$ORIGIN/../../../torch/lib")
set_target_properties(lockstep_train lockstep_verify lockstep_plan lockstep_data lockstep_gpus PROPERTIES INSTALL_RPATH "${lockstep_program_rpath}")

set(CMAKE_INSTALL_DEFAULT_COMPONENT_NAME lockstep)
install(TARGETS lockstep EXPORT lockstepTargets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} NAMELINK_COMPONENT local)
install(TARGETS lockstep_command RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(TARGETS lockstep_train lockstep_verify lockstep_plan lockstep_data lockstep_gpus RUNTIME DESTINATION libexec/lockstep)
install(DIRECTORY ${CMAKE_BINARY_DIR}/libexec/lockstep/tools DESTINATION libexec/lockstep)
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

install(CODE "
  set(link \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/${lockstep_torch_link}\")
  if(IS_SYMLINK \"\${link}\" OR NOT EXISTS \"\${link}\")
    get_filename_component(folder \"\${link}\" DIRECTORY)
    file(MAKE_DIRECTORY \"\${folder}\")
    file(CREATE_LINK \"${LOCKSTEP_TORCH_DIR}\" \"\${link}\" SYMBOLIC)
  endif()" COMPONENT local)

# What a wheel is packed from; all of it is part of the release build.
add_custom_target(packaged DEPENDS lockstep lockstep_command lockstep_train lockstep_verify lockstep_plan lockstep_data lockstep_gpus)
if(TARGET lockstep_python)
  add_dependencies(packaged lockstep_python)
  install(TARGETS lockstep_python LIBRARY DESTINATION . COMPONENT python EXCLUDE_FROM_ALL)
  # The only library of Debian's that auditwheel leaves to the machine, besides those of glibc and gcc.
  file(REAL_PATH ${ZLIB_LIBRARY_RELEASE} zlib)
  install(FILES ${zlib} DESTINATION ${CMAKE_INSTALL_LIBDIR} RENAME libz.so.1 COMPONENT python EXCLUDE_FROM_ALL)
endif()
if(SKBUILD)
  install(PROGRAMS ${PROJECT_SOURCE_DIR}/python/lockstep DESTINATION ${SKBUILD_SCRIPTS_DIR} COMPONENT python EXCLUDE_FROM_ALL)
endif()
