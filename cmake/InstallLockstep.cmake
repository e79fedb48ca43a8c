# cmake --install: the library, its headers, the command, and a package that find_package(lockstep) finds.
