# SPDX-License-Identifier: Apache-2.0
# What is installed, and where: the library, its headers, the command, and a package that find_package(lockstep) finds.
#
# Components: `lockstep` and `local` are what `cmake --install` alone installs; `local` ties it to the libtorch of this build. A
# Debian package has `lockstep` alone. `python` is what a wheel has below the package: all that depends on torch's release in a
# folder of that release, such as torch2.15/, so one wheel can have several, and the headers beside it.
#
# Installed files contain no path of this machine. HOME is the prefix, or the folder of a release. Torch's folder is
# HOME/../../torch, as in site-packages, or HOME/lib/lockstep/torch, a link or a folder.
include(CMakePackageConfigHelpers)

set(lockstep_torch_link ${CMAKE_INSTALL_LIBDIR}/lockstep/torch)
set(lockstep_programs lockstep_train lockstep_verify lockstep_plan lockstep_data lockstep_gpus)

set_target_properties(lockstep PROPERTIES INSTALL_RPATH "$ORIGIN;$ORIGIN/lockstep/torch/lib;$ORIGIN/../../../torch/lib")
set(lockstep_program_rpath "$ORIGIN/../../${CMAKE_INSTALL_LIBDIR}"
  "$ORIGIN/../../${lockstep_torch_link}/lib" "$ORIGIN/../../../../torch/lib")
set_target_properties(${lockstep_programs} PROPERTIES INSTALL_RPATH "${lockstep_program_rpath}")

configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/lockstepConfig.cmake.in lockstepConfig.cmake
  INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/lockstep)
write_basic_package_version_file(lockstepConfigVersion.cmake COMPATIBILITY SameMinorVersion)

# All files below `home`, a folder of the prefix that ends with /, or nothing.
function(lockstep_install component home)
  set(CMAKE_INSTALL_DEFAULT_COMPONENT_NAME ${component})
  set(package ${home}${CMAKE_INSTALL_LIBDIR}/cmake/lockstep)
  install(TARGETS lockstep EXPORT lockstep_of_${component} ${ARGN}
    LIBRARY DESTINATION ${home}${CMAKE_INSTALL_LIBDIR} COMPONENT ${component} NAMELINK_COMPONENT local)
  install(TARGETS lockstep_command RUNTIME DESTINATION ${home}${CMAKE_INSTALL_BINDIR} ${ARGN})
  install(TARGETS ${lockstep_programs} RUNTIME DESTINATION ${home}libexec/lockstep ${ARGN})
  install(DIRECTORY ${CMAKE_BINARY_DIR}/libexec/lockstep/tools DESTINATION ${home}libexec/lockstep ${ARGN})
  install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/lockstep DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} ${ARGN}
    FILES_MATCHING PATTERN "*.h")
  install(EXPORT lockstep_of_${component} FILE lockstepTargets.cmake NAMESPACE lockstep:: DESTINATION ${package} ${ARGN})
  install(FILES
    ${CMAKE_CURRENT_BINARY_DIR}/lockstepConfig.cmake
    ${CMAKE_CURRENT_BINARY_DIR}/lockstepConfigVersion.cmake
    ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/LockstepLibtorch.cmake
    DESTINATION ${package} ${ARGN})
endfunction()

lockstep_install(lockstep "")

install(CODE "
  set(link \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/${lockstep_torch_link}\")
  if(IS_SYMLINK \"\${link}\" OR NOT EXISTS \"\${link}\")
    get_filename_component(folder \"\${link}\" DIRECTORY)
    file(MAKE_DIRECTORY \"\${folder}\")
    file(CREATE_LINK \"${LOCKSTEP_TORCH_DIR}\" \"\${link}\" SYMBOLIC)
  endif()" COMPONENT local)

# What a wheel is packed from; all of it is part of the release build.
add_custom_target(packaged DEPENDS lockstep lockstep_command ${lockstep_programs})
if(lockstep_python_modules)
  set(home torch${LOCKSTEP_TORCH_VERSION}/)
  lockstep_install(python ${home} EXCLUDE_FROM_ALL)
  add_dependencies(packaged ${lockstep_python_modules})
  install(TARGETS ${lockstep_python_modules} LIBRARY DESTINATION ${home} COMPONENT python EXCLUDE_FROM_ALL)
  # The only library of Debian's that auditwheel leaves to the machine, besides those of glibc and gcc.
  file(REAL_PATH ${ZLIB_LIBRARY_RELEASE} zlib)
  install(FILES ${zlib} DESTINATION ${home}${CMAKE_INSTALL_LIBDIR} RENAME libz.so.1 COMPONENT python EXCLUDE_FROM_ALL)
endif()
if(SKBUILD)
  install(PROGRAMS ${PROJECT_SOURCE_DIR}/python/lockstep DESTINATION ${SKBUILD_SCRIPTS_DIR} COMPONENT python EXCLUDE_FROM_ALL)
endif()
